"use strict";
// Tables are sorted by a click on a head.
(() => {
  function sortable(table) {
    const value = (row, i) => {
      const text = row.cells[i].textContent.trim(), parsed = parseFloat(text);
      return text === "–" ? null : Number.isNaN(parsed) ? text : parsed;
    };
    const compare = (a, b) => a === null ? (b === null ? 0 : 1) : b === null ? -1 : typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), undefined, {numeric: true});
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.textContent = head.textContent || "name";
      Object.assign(button, {type: "button", className: "sort"});
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending", rows = [...table.tBodies[0].rows];
        heads.forEach(one => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.sort((a, b) => {
          const [p, q] = [value(a, i), value(b, i)];
          return p === null || q === null || !down ? compare(p, q) : compare(q, p);
        });
        table.tBodies[0].append(...rows);
      });
    });
  }

  document.querySelectorAll("table[data-sort]:not([data-live])").forEach(table => { table.dataset.live = ""; sortable(table); });
})();

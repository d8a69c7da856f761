"use strict";
// What is drawn or listed, to touch: plots are drawn again at the width of the page, to point at, zoom and filter; tables sort.
(() => {
  const SPACE = "http://www.w3.org/2000/svg", HIGH = 190, EDGE = {left: 46, right: 16, top: 8, bottom: 34};
  const number = value => String(+value.toPrecision(4));

  function make(tag, text = "", attributes = {}, ...inside) {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...inside);
    return element;
  }

  function draw(svg, tag, attributes, text = "") {
    const element = svg.appendChild(document.createElementNS(SPACE, tag));
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }

  // Round numbers within a range, about so many.
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find(s => s * power >= .75 * rough);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1)}, (_, i) => (first + i) * step);
  }

  // ---- a figure: panels over one axis, which are zoomed together

  function enliven(figure) {
    const panels = JSON.parse(figure.dataset.plot), hidden = new Set(), all = panels.map(panel => panel.xlim);
    const whole = [Math.min(...all.map(x => x[0])), Math.max(...all.map(x => x[1]))];
    const several = panels.map(panel => panel.lines).filter(lines => lines.filter(line => line.mark == null).length > 1);
    const names = [...new Map(several.flat().filter(line => line.name).map(line => [line.name, line]))];
    let view = whole, at = null;
    const counted = panels.every(panel => panel.lines.every(line => (line.points || []).every(point => Number.isInteger(point[0]))));  // steps, not times
    const shown = panel => panel.lines.filter(line => !hidden.has(line.name));
    const zoom = range => {
      const low = Math.max(range[0], whole[0]), high = Math.min(range[1], whole[1]);
      if (high - low > (whole[1] - whole[0]) / 200) view = low === whole[0] && high === whole[1] ? whole : [low, high];
      redraw();
    };
    const around = factor => {
      const middle = at ?? (view[0] + view[1]) / 2;
      zoom([middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor]);
    };

    const boxes = names.map(([name, line]) => {
      const box = make("input", "", {type: "checkbox", checked: ""});
      box.addEventListener("change", () => { box.checked ? hidden.delete(name) : hidden.add(name); redraw(); });
      return make("label", "", {}, box, make("span", "", {class: "key", style: `background:${line.colour}`}), name);
    });
    const button = (text, named, act) => {
      const made = make("button", text, {type: "button", "aria-label": named, title: named});
      made.addEventListener("click", act);
      return made;
    };
    const row = make("div", "", {class: "row plotted", role: "group", "aria-label": "Lines and zoom"}, ...boxes,
      button("+", "zoom in", () => around(.5)), button("−", "zoom out", () => around(2)), button("↺", "show all", () => zoom(whole)));

    // ---- one panel

    function panelOf(panel) {
      const svg = document.createElementNS(SPACE, "svg"), tip = make("output", "", {class: panel.lines.length > 2 ? "tip tall" : "tip"});
      const title = panel.title || panel.y;
      const box = make("div", "", {class: "panel", tabindex: 0, role: "group",
        "aria-label": `${title}: arrow keys read the points, plus and minus zoom`}, make("b", title), svg, tip);
      svg.setAttribute("aria-hidden", "true");
      let width = 0, start = null, x, y;

      function redrawPanel() {
        width = Math.max(160, svg.getBoundingClientRect().width);
        const near = points => points.filter((p, i) => [points[i - 1], p, points[i + 1]].some(q => q && q[0] >= view[0] && q[0] <= view[1]));
        const inside = shown(panel).flatMap(line => [...near(line.points), ...near(line.band || [])]);
        const levels = shown(panel).filter(line => line.level != null).map(line => line.level);
        const values = [...inside.map(p => p[1]), ...levels];
        let [low, high] = view === whole && !hidden.size ? panel.ylim : [Math.min(...values), Math.max(...values)];
        if (view !== whole || hidden.size) [low, high] = [low - .04 * (high - low), high + .04 * (high - low)];
        if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - .5, low + .5] : [0, 1];
        x = value => EDGE.left + (value - view[0]) / (view[1] - view[0]) * (width - EDGE.left - EDGE.right);
        y = value => HIGH - EDGE.bottom - (value - low) / (high - low) * (HIGH - EDGE.top - EDGE.bottom);
        svg.replaceChildren();
        svg.setAttribute("viewBox", `0 0 ${width} ${HIGH}`);
        for (const value of ticks(low, high, 4)) {
          draw(svg, "line", {class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value)});
          draw(svg, "text", {x: EDGE.left - 5, y: y(value) + 4, "text-anchor": "end"}, number(value));
        }
        for (const value of ticks(...view, width / 70).filter(value => !counted || Math.abs(value - Math.round(value)) < 1e-6)) {
          draw(svg, "line", {class: "grid", x1: x(value), x2: x(value), y1: EDGE.top, y2: HIGH - EDGE.bottom});
          draw(svg, "text", {x: x(value), y: HIGH - EDGE.bottom + 14, "text-anchor": "middle"}, number(value));
        }
        draw(svg, "text", {x: (EDGE.left + width - EDGE.right) / 2, y: HIGH - 4, "text-anchor": "middle"}, panel.x);
        const inner = draw(svg, "clipPath", {id: clip});
        draw(inner, "rect", {x: EDGE.left, y: 0, width: width - EDGE.left - EDGE.right, height: HIGH - EDGE.bottom + 2});
        const path = points => points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
        for (const line of shown(panel)) {
          const look = {stroke: line.colour, "clip-path": `url(#${clip})`, "stroke-dasharray": line.dashed ? "5 4" : "none"};
          if (line.band) draw(svg, "polygon", {points: path(line.band), fill: line.colour, opacity: .15, "clip-path": `url(#${clip})`});
          if (line.level != null) draw(svg, "line", {...look, x1: EDGE.left, x2: width, y1: y(line.level), y2: y(line.level)});
          if (line.mark != null) draw(svg, "line", {...look, x1: x(line.mark), x2: x(line.mark), y1: 0, y2: HIGH - EDGE.bottom});
          draw(svg, "polyline", {...look, points: path(line.points), fill: "none", "stroke-width": 1.8});
          if (line.points.length < 60) for (const p of line.points) draw(svg, "circle", {cx: x(p[0]), cy: y(p[1]), r: 2.6, fill: line.colour, "clip-path": `url(#${clip})`});
        }
        if (at != null && at >= view[0] && at <= view[1]) draw(svg, "line", {class: "guide", x1: x(at), x2: x(at), y1: EDGE.top, y2: HIGH - EDGE.bottom});
        read();
      }

      function read() {
        const here = shown(panel).flatMap(line => line.level != null ? [[line, line.level]]
          : line.points.filter(p => p[0] === at).map(p => [line, p[1]]));
        tip.replaceChildren(...at == null || !here.length ? [] : [make("span", `${panel.x} ${number(at)}: `), ...here.map(([line, value]) => {
          const text = `${line.name ? `${line.name} ` : ""}${number(value)}`;
          return make("span", "", {style: `border-color:${line.colour}`}, line.url ? make("a", text, {href: line.url, title: "episodes of this arm"}) : text);
        })]);
      }

      const places = () => [...new Set(shown(panel).flatMap(line => line.points.map(p => p[0])))].sort((a, b) => a - b).filter(v => v >= view[0] && v <= view[1]);
      const pointed = event => {
        const box = svg.getBoundingClientRect();
        return view[0] + ((event.clientX - box.x) / box.width * width - EDGE.left) / (width - EDGE.left - EDGE.right) * (view[1] - view[0]);
      };
      const nearest = value => places().reduce((best, v) => best == null || Math.abs(v - value) < Math.abs(best - value) ? v : best, null);
      svg.addEventListener("pointermove", event => {
        at = nearest(pointed(event));
        redraw();
        if (start != null) draw(svg, "rect", {class: "chosen", x: Math.min(x(start), x(pointed(event))), width: Math.abs(x(pointed(event)) - x(start)), y: EDGE.top, height: HIGH - EDGE.top - EDGE.bottom});
      });
      svg.addEventListener("pointerdown", event => { start = pointed(event); svg.setPointerCapture(event.pointerId); });
      svg.addEventListener("pointerup", event => {
        const end = pointed(event), from = start;
        start = null;
        if (Math.abs(x(end) - x(from)) > 8) zoom([Math.min(from, end), Math.max(from, end)]);
        else { at = nearest(end); redraw(); }
      });
      svg.addEventListener("pointercancel", () => { start = null; redraw(); });
      svg.addEventListener("dblclick", () => zoom(whole));
      box.addEventListener("keydown", event => {
        const all = places(), i = all.indexOf(at), step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
        if (step) { at = all[Math.min(all.length - 1, Math.max(0, i < 0 ? 0 : i + step))] ?? null; redraw(); }
        else if (event.key === "+") around(.5);
        else if (event.key === "-") around(2);
        else if (event.key === "Escape" || event.key === "0") zoom(whole);
        else return;
        event.preventDefault();
      });
      const clip = `clip${Math.random().toString(36).slice(2)}`;
      return {box, redrawPanel};
    }

    const made = panels.map(panelOf), redraw = () => made.forEach(one => one.redrawPanel());
    const live = make("div", "", {class: "live"}, row, make("div", "", {class: "panels", style: `--least:${panels.length > 4 ? 15 : 20}rem`}, ...made.map(one => one.box)));
    figure.append(live);
    figure.classList.add("touched");
    new ResizeObserver(redraw).observe(live);
  }

  // ---- a table: each head sorts

  function sortable(table) {
    const value = (row, i) => {
      const text = row.cells[i].textContent.trim(), parsed = parseFloat(text);
      return text === "–" ? null : Number.isNaN(parsed) ? text : parsed;
    };
    const compare = (a, b) => a === null ? (b === null ? 0 : 1) : b === null ? -1 : typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), undefined, {numeric: true});
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      const button = make("button", head.textContent || "name", {type: "button", class: "sort"});
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

  const once = (selector, act) => document.querySelectorAll(`${selector}:not([data-live])`).forEach(one => { one.dataset.live = ""; act(one); });
  once("figure[data-plot]", enliven);
  once("table[data-sort]", sortable);
})();

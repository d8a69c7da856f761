// The sidebar shows where one is; what scrolls can be scrolled by keyboard; results say what they are; Ctrl-K (on a Mac, Command-K) goes
// to the search.
const reach = () => {
  for (const block of document.querySelectorAll(".highlight pre, .cr .scroll, table.docutils")) if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
};
document.addEventListener("DOMContentLoaded", () => {
  for (const [name, words] of [["sidebar", "Pages"], ["toc", "On this page"]]) document.querySelector(`.${name}-drawer`)?.setAttribute("aria-label", words);
  reach();
  document.addEventListener("toggle", reach, {capture: true});  // what is folded has no width
  const results = document.querySelector("#search-results"), root = document.documentElement.dataset.content_root;
  const label = link => {
    const page = link.getAttribute("href").replace(root, "").split(".html")[0];
    link.dataset.kind = link.parentElement.matches(".kind-object") ? "API" : window.KINDS[page] ?? "page";
  };
  const added = changes => changes.flatMap(one => [...one.addedNodes]).forEach(node => node.querySelectorAll?.(":scope > a").forEach(label));
  if (results) new MutationObserver(added).observe(results, {childList: true, subtree: true});
});
window.addEventListener("resize", reach);
window.addEventListener("load", () => {  // not before: without its styles the box cannot be scrolled; at once, not smoothly
  const here = document.querySelector(".sidebar-tree .current-page"), box = document.querySelector(".sidebar-scroll");
  if (!here || !box) return;
  const above = here.getBoundingClientRect().top - box.getBoundingClientRect().top;
  box.scrollBy({top: above - box.clientHeight / 3, behavior: "instant"});
});
document.addEventListener("keydown", event => {
  const field = document.querySelector("input.sidebar-search");
  if (event.key !== "k" || !(event.ctrlKey || event.metaKey) || !field) return;
  event.preventDefault();
  if (!field.checkVisibility({visibilityProperty: true})) document.querySelector("label[for=__navigation]")?.click();
  field.focus();
  field.select();
});

// The sidebar shows where one is; what scrolls can be scrolled by keyboard; Ctrl-K (on a Mac, Command-K) goes to the search.
document.addEventListener("DOMContentLoaded", () => {
  for (const [name, words] of [["sidebar", "Pages"], ["toc", "On this page"]]) document.querySelector(`.${name}-drawer`)?.setAttribute("aria-label", words);
  for (const block of document.querySelectorAll(".highlight pre, .cr .scroll")) if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
});
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

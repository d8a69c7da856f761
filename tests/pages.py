"""What tests of pages share: which they open, a picture to look at, and texts that are hard to read."""
import json
import os
from pathlib import Path

LIMIT = 60_000  # milliseconds that anything may take; nothing needs a tenth of it on an idle machine

PAGES = ("index", "explorer", "error_site", "training_step", "episodes", "exploits", "replay", "guide", "gaps", "commands",
         "report/display", "report/ladder", "core/trace", "spikes/004-ab")


def picture(page, name):
    "A screenshot to look at, where a folder for them is named; none is kept in git."
    if folder := os.environ.get("COMPOSER_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


GROUND = """
const parse = text => {
  const n = text.match(/[\\d.]+(?:e-?\\d+)?/g).map(Number);
  return text.startsWith('color(') ? [...n.slice(0, 3).map(x => 255 * x), n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1];
};
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const ground = node => {
  const seen = [];
  for (let n = node; n; n = n.parentElement) seen.push(parse(getComputedStyle(n).backgroundColor));
  return seen.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
const light = colour => {
  const [r, g, b] = colour.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const faint = new Set();
let measured = 0;
for (const node of document.querySelectorAll(SELECTOR)) {
  const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  const seen = node.checkVisibility({visibilityProperty: true, opacityProperty: true});
  if (!own || !seen || node.closest('svg, style, script, [aria-hidden=true], .headerlink')) continue;
  measured += 1;
  const below = ground(node), look = getComputedStyle(node), ink = over(parse(look.color), below);
  const [a, b] = [light(ink), light(below)].sort((x, y) => x - y), ratio = (b + .05) / (a + .05);
  const size = parseFloat(look.fontSize), large = size >= 24 || size >= 18.66 && look.fontWeight >= 700;
  const said = `${node.tagName} ${node.className}: ${node.textContent.trim().slice(0, 40)}`;
  if (ratio < (large ? 3 : 4.5)) faint.add(`${ratio.toFixed(2)} ${said}`);
}
if (!measured) faint.add('nothing was measured');
return [...faint];
"""


def faint(page, selector):
    "Texts whose contrast with what lies below them is lower than WCAG 2.2 AA asks for."
    return page.evaluate("() => {" + GROUND.replace("SELECTOR", json.dumps(selector)) + "}")

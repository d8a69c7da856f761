"use strict";
const data = JSON.parse(document.getElementById("episodes").textContent);
const $ = id => document.getElementById(id);
let entry = data.menu[0], at = 0, hints = true;

function make(tag, text, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function mark(reward) {
  return reward == null ? "– not scored" : reward >= 1 ? "✓ solved" : "✗ not solved";
}

// ---- one turn

function probability(turn, i) {
  const hinted = turn.hint && hints ? `; with the hint ${turn.hint.p[i]}` : "";
  return `“${turn.tokens[i]}”: probability ${turn.p[i]}${hinted}`;
}

function strip(label, turn, p) {
  const tokens = p.map((value, i) => make("span", turn.tokens[i], {
    class: hints && turn.hint && turn.hint.at === i ? "tok most" : "tok", role: "option", "aria-selected": "false",
    "aria-label": probability(turn, i), title: probability(turn, i), tabindex: i ? -1 : 0, style: `--u:${1 - value}`}));
  return [make("h3", label), make("div", "", {class: "strip", role: "listbox", "aria-label": label, "aria-orientation": "horizontal"},
                                  ...tokens)];
}

function alternatives(turn) {
  const hint = turn.hint;
  const cell = (p, who) => make("td", "", {}, make("span", "", {class: `bar ${who}`, style: `width:${100 * p}px`}), ` ${p}`);
  const rows = hint.alternatives.map(([text, p, q]) => make("tr", "", {},
    make("td", "", {}, make("code", text)), cell(p, "s"), cell(q, "t")));
  const heads = ["token", "without the hint", "with the hint"].map(text => make("th", text, {scope: "col"}));
  return make("table", "", {}, make("caption", `Where the hint changes most, at “${turn.tokens[hint.at]}” (outlined): the likeliest ` +
    `tokens. ${hint.distance} of the probability moves.`), make("thead", "", {}, make("tr", "", {}, ...heads)), make("tbody", "", {}, ...rows));
}

function turnParts(turn) {
  const parts = turn.error ? [make("p", `⚠ error: ${turn.error}`, {class: "bad"})] : [];
  if (turn.role !== "assistant") return [...parts, make("pre", turn.text || "", {tabindex: 0})];
  if (!turn.tokens) return parts;
  if (!hints || !turn.error) return [...parts, ...strip("what was sampled", turn, turn.p)];
  if (!turn.hint) return [...parts, make("p", `No hint: ${turn.unhinted || "unknown"}.`, {class: "dim"}), ...strip("what was sampled", turn, turn.p)];
  return [...parts, make("h3", `the hint, from the layer “${turn.hint.layer}”`), make("p", turn.hint.text, {class: "hint"}),
          ...strip("what was sampled, without the hint", turn, turn.p), ...strip("the same tokens with the hint", turn, turn.hint.p),
          alternatives(turn)];
}

function show() {
  const turns = data.episodes[entry.episode].turns, turn = turns[at], inside = $("turn").contains(document.activeElement);
  $("heading").textContent = turn ? `Turn ${at + 1} of ${turns.length}: ${turn.role}` : "No turn was played";
  $("turn").replaceChildren(...(turn ? turnParts(turn) : []));
  $("readout").textContent = turn && turn.tokens ? "Point at a token for its probability." : "";
  $("hints").textContent = `hints: ${hints ? "on" : "off"}`;
  $("hints").setAttribute("aria-pressed", hints);
  $("previous").setAttribute("aria-disabled", at <= 0);
  $("next").setAttribute("aria-disabled", at >= turns.length - 1);
  [...$("turns").children].forEach((item, i) => item.firstChild.setAttribute("aria-current", i === at ? "step" : "false"));
  if (inside) $("turn").querySelector("[tabindex='0']")?.focus();
}

function go(to) {
  const last = data.episodes[entry.episode].turns.length - 1;
  at = Math.max(0, Math.min(to, last));
  show();
}

// ---- which episode

function fill(select, entries, text) {
  select.replaceChildren(...entries.map(e => make("option", text(e), {value: data.menu.indexOf(e)})));
  select.value = data.menu.indexOf(entry);
}

function nearest(arm, task, attempt) {
  const score = e => 4 * (e.arm === arm) + 2 * (e.task === task) + (e.attempt === attempt);
  return data.menu.reduce((best, e) => score(e) > score(best) ? e : best);
}

function choose(next) {
  if (next.task !== entry.task) at = 0;
  entry = next;
  const episode = data.episodes[entry.episode], task = data.tasks[entry.task], outcome = e => mark(data.episodes[e.episode].reward);
  const different = (name, which) => [...new Set(data.menu.filter(which).map(e => e[name]))];
  fill($("arm"), different("arm", e => true).map(arm => nearest(arm, entry.task, entry.attempt)), e => e.arm);
  fill($("task"), different("task", e => e.arm === entry.arm).map(t => nearest(entry.arm, t, entry.attempt)),
       e => `${data.tasks[e.task].name} (${outcome(e)})`);
  fill($("attempt"), data.menu.filter(e => e.arm === entry.arm && e.task === entry.task), e => `${e.attempt} (${outcome(e)})`);
  $("outcome").textContent = `${task.prompt} ${mark(episode.reward)}; ended: ${episode.ending}` + (episode.problem ? `, ${episode.problem}` : "");
  $("offered").replaceChildren(...task.files.flatMap(([path, text]) => [make("h3", path), make("pre", text, {tabindex: 0})]),
                             make("h3", "tools that are offered"), make("pre", task.tools.join("\n"), {tabindex: 0}));
  $("turns").replaceChildren(...episode.turns.map((turn, i) => {
    const button = make("button", `${i + 1} ${turn.role === "assistant" ? "▸" : "◂"} ${turn.error ? "⚠ " : ""}${turn.text || ""}`,
                        {type: "button", "aria-label": `turn ${i + 1}, ${turn.role}${turn.error ? `, error ${turn.error}` : ""}`});
    button.addEventListener("click", () => go(i));
    return make("li", "", {}, button);
  }));
  go(at);
}

// ---- what the reader does

for (const name of ["arm", "task", "attempt"]) $(name).addEventListener("change", e => choose(data.menu[e.target.value]));
$("previous").addEventListener("click", () => go(at - 1));
$("next").addEventListener("click", () => go(at + 1));
$("hints").addEventListener("click", () => { hints = !hints; show(); });
for (const event of ["pointerover", "focusin"]) $("turn").addEventListener(event, e => {
  const token = e.target.closest(".tok");
  if (token) $("readout").textContent = token.getAttribute("aria-label");
});

function within(token, key) {
  const all = [...token.parentNode.children], i = all.indexOf(token);
  const to = all[{ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: all.length - 1}[key]] || token;
  token.setAttribute("tabindex", -1);
  to.setAttribute("tabindex", 0);
  to.focus();
}

document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.altKey || e.metaKey || e.target.closest("select")) return;
  const token = e.target.closest(".tok");
  if (token && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(e.key)) within(token, e.key);
  else if (e.key === "ArrowLeft") go(at - 1);
  else if (e.key === "ArrowRight") go(at + 1);
  else if (e.key.toLowerCase() === "h") { hints = !hints; show(); }
  else return;
  e.preventDefault();
});

// A link names an arm and a task: episodes.html#arm=A2&task=0
const wanted = new URLSearchParams(location.hash.slice(1)), arm = wanted.get("arm"), task = wanted.get("task");
const fitting = data.menu.filter(e => (!arm || e.arm.split(" ")[0] === arm) && (!task || e.task === Number(task)));
choose((arm || task) && (fitting.find(e => e.attempt.startsWith("after")) || fitting[0]) || entry);

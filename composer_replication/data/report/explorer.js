"use strict";
document.querySelectorAll(".explorer").forEach((root, number) => {
  const data = JSON.parse(root.querySelector("script").textContent);
  const part = name => root.querySelector(`[data-is=${name}]`);
  const at = {trace: data.start[0], turn: 0, layer: "", token: 0};

  function make(tag, text, attributes = {}, ...inside) {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...inside);
    return element;
  }

  // A button of a group: a radio, so that the arrow keys walk along it.
  function radio(group, look, label, named, checked, choose, inside) {
    const input = make("input", "", {type: "radio", name: `${group}-${number}`, "aria-label": named});
    input.checked = checked;
    input.addEventListener("change", choose);
    return make("label", "", {class: look, title: named}, input, ...inside || [label]);
  }

  const trace = () => data.traces[at.trace], sites = () => trace().sites;
  const site = () => sites().find(one => one.turn === at.turn);
  const hint = () => site().hints.find(one => one.layer === at.layer);
  const sum = numbers => numbers.reduce((a, b) => a + b, 0), nearly = (value, least, digits) => value < least ? `under ${least}` : value.toFixed(digits);
  const three = p => p < .0005 ? "under 0.001" : p.toFixed(3);

  // ---- one turn

  function readToken() {
    const i = at.token, now = hint(), q = now ? now.q[i] : site().p[i];
    const bar = (p, who) => make("td", "", {}, make("span", "", {class: `bar ${who}`, style: `width:${7 * p}rem`}), ` ${three(p)}`);
    const rows = [[site().tokens[i], site().p[i], q, true], ...(now?.others[i] || [])].map(([text, p, q, sampled]) => make("tr", "", {},
      make("th", "", {scope: "row"}, make("code", text), sampled ? make("span", " sampled", {class: "dim"}) : ""), bar(p, "s"), bar(q, "t")));
    part("caption").textContent = `Token ${i + 1} of ${site().tokens.length}` + (now ? `, divergence ${now.nats[i]} nats` : "");
    part("others").replaceChildren(...rows);
  }

  // How far each layer's hint, and the control, move the turn; and how much of that lies on the tokens of its call.
  function moved(one) {
    const all = sum(one.nats), call = site().call;
    return {all, most: one.nats.indexOf(Math.max(...one.nats)), share: call == null || !all ? null : sum(one.nats.slice(call)) / all};
  }

  function compare() {
    const here = site(), largest = Math.max(...here.hints.map(one => moved(one).all)), calls = here.call == null ? 0 : here.tokens.length - here.call;
    part("size").textContent = `Divergence of the turn's ${here.tokens.length} tokens` + (calls ? `, ${calls} of them its call` : "");
    part("layered").replaceChildren(...here.hints.map((one, i) => {
      const {all, share} = moved(one), bar = make("span", "", {class: "bar t", style: `width:${largest ? 7 * all / largest : 0}rem`});
      return make("tr", "", one.layer === at.layer ? {class: "now"} : {}, make("th", one.layer + (i ? "" : " ✓"), {scope: "row"}),
        make("td", "", {}, bar, ` ${nearly(all, .01, 2)}`), make("td", share == null ? "–" : `${Math.round(100 * share)} %`));
    }));
    const now = hint(), {most, share} = now ? moved(now) : {}, prose = now && here.call > most && share < .5;
    part("prose").textContent = prose ? `${at.layer === data.layers.at(-1) ? "These words move" : "The hint moves"} the text before the call more than the call: ${Math.round(100 * share)} % of the divergence ` +
      `lies on the call's ${calls} tokens.` : "";
  }

  function readHint() {
    const now = hint(), here = site(), {all, most} = now && now.nats ? moved(now) : {all: 0, most: -1};
    part("hint").textContent = now ? now.text : here.unread ? "No hint." : "No hint: the model reads the turn as it was.";
    if (here.unread) return;
    part("tokens").querySelectorAll(".token").forEach((token, i) => {
      token.style.setProperty("--q", now ? now.q[i] : here.p[i]);
      token.classList.toggle("most", i === most);
      token.title = `“${here.tokens[i]}”: probability ${three(here.p[i])}` + (now ? `, with the hint ${three(now.q[i])}` : "");
      token.firstChild.setAttribute("aria-label", token.title);
      if (now && i === most) token.firstChild.checked = true;
    });
    if (now) at.token = most;
    part("said").textContent = now ? `Most at “${here.tokens[most]}”: from probability ${three(here.p[most])} to ${three(now.q[most])}. ` +
      `Divergence of the turn: ${all.toFixed(2)} nats over ${here.tokens.length} tokens.` : "Choose a layer and see the columns move.";
    compare();
    readToken();
  }

  function readTurn() {
    const turn = trace().turns[at.turn], here = site();
    part("title").textContent = `Turn ${at.turn} of ${trace().turns.length - 1}: ${turn.role}`;
    const reader = here && !here.unread && data.reader ? `; read by ${data.reader}` : "";
    part("by").hidden = turn.role !== "assistant";
    part("by").textContent = (trace().model ? `Sampled by ${trace().model}` : "Who sampled it is not recorded") + `${reader}.`;
    part("text").textContent = turn.text || "(an empty turn)";
    part("site").hidden = !here;
    if (!here) return;
    part("error").textContent = `⚠ ${here.kind}, shown by turn ${here.shown}:`;
    part("answer").textContent = trace().turns[here.shown].text;
    if (!hint()) at.layer = here.hints[0]?.layer || "";
    part("bars").hidden = Boolean(here.unread);
    part("unread").hidden = !here.unread;
    part("unread").textContent = here.unread || "";
    const layers = ["", ...data.layers].map(layer => {
      const there = !layer || here.hints.some(one => one.layer === layer), taken = layer === here.hints[0]?.layer;
      const named = layer ? layer + (taken ? " ✓" : "") : "no hint";
      const title = layer ? taken ? `${layer}: what training takes` : there ? layer : `${layer}: has no hint here` : "no hint";
      const button = radio("layer", "tab", named, title, layer === at.layer, () => { at.layer = layer; readHint(); });
      button.firstChild.disabled = !there;
      return button;
    });
    part("layers").replaceChildren(...layers);
    part("tokens").replaceChildren(...(here.tokens || []).flatMap((text, i) => {
      const token = radio("token", "token", "", text, !i, () => { at.token = i; readToken(); }, [make("i", ""), make("span", text)]);
      token.style.setProperty("--p", here.p[i]);
      return here.call && i === here.call ? [make("span", "the call:", {class: "part"}), token] : [token];
    }));
    readHint();
  }

  // ---- which turn, which trace

  function listTurns() {
    const signs = {system: "⚙", user: "☺", assistant: "▸", tool: "◂"}, every = part("every").checked;
    part("signs").hidden = !every;
    part("turns").replaceChildren(...trace().turns.flatMap((turn, i) => {
      const wrong = sites().find(one => one.turn === i), named = `turn ${i}, ${turn.role}${wrong ? `, error: ${wrong.kind}` : ""}`;
      const look = wrong ? "tab bad" : turn.role === "assistant" ? "tab mine" : "tab";
      const shown = every ? `${i} ${signs[turn.role]}${wrong ? " ⚠" : ""}` : `${i} ${wrong?.kind}${wrong?.unread ? "" : ", bars"}`;
      return every || wrong ? [radio("turn", look, shown, named, i === at.turn, () => { at.turn = i; readTurn(); })] : [];
    }));
  }

  // Without the others the turn in view is an error turn: the one before it, or the first.
  function switchTurns() {
    if (!part("every").checked && !site()) at.turn = (sites().findLast(one => one.turn < at.turn) || sites()[0]).turn;
    listTurns();
    readTurn();
  }

  function enter(number, turn) {
    at.trace = number;
    const kind = part("kind").value, first = sites().find(one => one.kind === kind) || sites()[0];
    at.turn = turn ?? first.turn;
    at.layer = "";
    listTurns();
    readTurn();
  }

  function listTraces(chosen) {
    const kind = part("kind").value, offered = data.traces.map((one, i) => i).filter(i => !kind || data.traces[i].sites.some(one => one.kind === kind));
    part("trace").replaceChildren(...offered.map(i => {
      const one = data.traces[i], reward = one.reward == null ? "" : `, reward ${one.reward}`;
      const there = one.sites.length < one.errors ? `${one.sites.length} of ${one.errors}` : one.errors, bars = one.sites.filter(site => !site.unread).length;
      const counts = `${there} error turn${one.errors > 1 ? "s" : ""}, ${bars} with bars${reward}`;
      return radio("trace", "trace", "", `${one.id}: ${counts}`, i === (chosen ?? offered[0]), () => enter(i), [make("b", one.id), make("span", counts, {class: "dim"})]);
    }));
    return offered;
  }

  const kinds = [...new Set(data.traces.flatMap(one => one.sites.map(one => one.kind)))].sort();
  part("kind").replaceChildren(make("option", "any", {value: ""}), ...kinds.map(kind => make("option", kind, {value: kind})));
  part("kind").addEventListener("change", () => enter(listTraces()[0]));
  part("every").addEventListener("change", switchTurns);
  listTraces(data.start[0]);
  enter(data.start[0], data.traces[data.start[0]].sites[data.start[1]].turn);
});

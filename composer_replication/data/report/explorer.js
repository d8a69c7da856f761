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

  function readHint() {
    const now = hint(), here = site(), nats = now?.nats || [], all = nats.reduce((a, b) => a + b, 0), most = now ? nats.indexOf(Math.max(...nats)) : -1;
    part("hint").textContent = now ? now.text : here.unread ? "No hint." : "No hint: the model reads the turn as it was.";
    if (here.unread) return;
    [...part("tokens").children].forEach((token, i) => {
      token.style.setProperty("--q", now ? now.q[i] : here.p[i]);
      token.classList.toggle("most", i === most);
      token.title = `“${here.tokens[i]}”: probability ${three(here.p[i])}` + (now ? `, with the hint ${three(now.q[i])}` : "");
      token.firstChild.setAttribute("aria-label", token.title);
      if (now && i === most) token.firstChild.checked = true;
    });
    if (now) at.token = most;
    part("said").textContent = now ? `Most at “${here.tokens[most]}”: from probability ${three(here.p[most])} to ${three(now.q[most])}. ` +
      `Divergence of the turn: ${all.toFixed(2)} nats over ${here.tokens.length} tokens.` : "Choose a layer and see the columns move.";
    readToken();
  }

  function readTurn() {
    const turn = trace().turns[at.turn], here = site();
    part("title").textContent = `Turn ${at.turn} of ${trace().turns.length - 1}: ${turn.role}`;
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
    part("tokens").replaceChildren(...(here.tokens || []).map((text, i) => {
      const token = radio("token", "token", "", text, !i, () => { at.token = i; readToken(); }, [make("i", ""), make("span", text)]);
      token.style.setProperty("--p", here.p[i]);
      return token;
    }));
    readHint();
  }

  // ---- which turn, which trace

  function readTrace() {
    const signs = {system: "⚙", user: "☺", assistant: "▸", tool: "◂"};
    part("turns").replaceChildren(...trace().turns.map((turn, i) => {
      const wrong = sites().find(one => one.turn === i), named = `turn ${i}, ${turn.role}${wrong ? `, error: ${wrong.kind}` : ""}`;
      const look = wrong ? "tab bad" : turn.role === "assistant" ? "tab mine" : "tab";
      return radio("turn", look, `${i} ${signs[turn.role]}${wrong ? " ⚠" : ""}`, named, i === at.turn, () => { at.turn = i; readTurn(); });
    }));
    readTurn();
  }

  function enter(number, turn) {
    at.trace = number;
    const kind = part("kind").value, first = sites().find(one => one.kind === kind) || sites()[0];
    at.turn = turn ?? first.turn;
    at.layer = "";
    readTrace();
  }

  function listTraces() {
    const kind = part("kind").value, offered = data.traces.map((one, i) => i).filter(i => !kind || data.traces[i].sites.some(one => one.kind === kind));
    part("trace").replaceChildren(...offered.map(i => {
      const one = data.traces[i], reward = one.reward == null ? "" : `, reward ${one.reward}`, made = one.model ? `, by ${one.model}` : "";
      const there = one.sites.length < one.errors ? `${one.sites.length} of ${one.errors}` : one.errors;
      return make("option", `${one.id}: ${there} error turn${one.errors > 1 ? "s" : ""}${reward}${made}`, {value: i});
    }));
    return offered;
  }

  const kinds = [...new Set(data.traces.flatMap(one => one.sites.map(one => one.kind)))].sort();
  part("kind").replaceChildren(make("option", "any", {value: ""}), ...kinds.map(kind => make("option", kind, {value: kind})));
  part("kind").addEventListener("change", () => enter(listTraces()[0]));
  part("trace").addEventListener("change", event => enter(Number(event.target.value)));
  listTraces();
  part("trace").value = data.start[0];
  enter(data.start[0], data.traces[data.start[0]].sites[data.start[1]].turn);
});

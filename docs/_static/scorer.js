// What a search shows first, by the kind of page (`stage.kinds`): guides and commands, then start, then module pages; an API name when it was typed.
const WEIGHTS = {guide: 40, command: 40, start: 20, background: 10, experiment: 5, API: 0, module: -10};
const SELDOM = /^(adrs\/|newcomer$|six-changes$|cli\/)/;  // meant by few who search
const split = text => text.toLowerCase().split(/\W+/).filter(word => word.length > 1);
const ASKED = split(new URLSearchParams(location.search).get("q") || "");
const PAIRS = ASKED.slice(1).map((word, i) => `${ASKED[i]} ${word}`);  // "hint layer"

var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const weight = SELDOM.test(page) ? -20 : WEIGHTS[window.KINDS?.[page]] ?? 0, words = split(`${page} ${title}`), text = words.join(" ");
    const module = anchor.startsWith("#module-"), typed = kind === "object" && !module && score >= 26 ? 60 : 0;  // its full name
    const named = 10 * ASKED.filter(word => word.length > 2 && words.includes(word)).length + 10 * PAIRS.filter(pair => text.includes(pair)).length;
    return score + weight + typed - (module ? 30 : 0) + named;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

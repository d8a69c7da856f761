// What a search shows first: guides and commands, then start pages and experiments, then module pages; an API name when it was typed.
const PAGE_WEIGHTS = [
  [/^(guides\/|guide$|troubleshooting$)/, 40], [/^commands$/, 40], [/^(index|error_site|training_step|episodes|exploits|replay)$/, 20],
  [/^(recipe|glossary|comparison)$/, 10], [/^(spikes\/|gaps$)/, 5], [/^(adrs\/|newcomer$|six-changes$|cli\/)/, -20], [/^/, -10]];
const ASKED = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\W+/).filter(word => word.length > 2);

var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const weight = PAGE_WEIGHTS.find(([pattern]) => pattern.test(page))[1], words = `${page} ${title}`.toLowerCase().split(/\W+/);
    const module = anchor.startsWith("#module-"), typed = kind === "object" && !module && score >= 26 ? 60 : 0;  // its full name
    return score + weight + typed - (module ? 30 : 0) + 10 * ASKED.filter(word => words.includes(word)).length;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

// Ranks the results of the search: what explains a name comes before lists of texts and of declarations.
const LOW = { messages: 40, command_line: 15, api: 5 };
var Scorer = {
  score: (result) => {
    const page = result[0];
    if (page.startsWith("api/")) return result[4] - 5;
    return result[4] - (LOW[page] || 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// The steps of a round whose draft is a tree: the draft, a test at each place of the path, the bonus token.
import { line, make, many, millis, quoted, share } from "../assets/page.js";
import { nested, walk } from "../race/tree.js";

/** All steps but the last, that of the cache. */
export const treeSteps = (step) => {
  const { draft, path, last, places, greedy } = step;
  const tests = walk(step).filter(({ tried }) => tried.length);
  const decided = [0]; // in which test it shows what becomes of a node, by its place; the branches follow their first
  for (const { after } of draft) decided.push(decided[after] + (after && draft[after - 1].code === "a" ? 1 : 0));
  const estimates = draft.some(({ q }) => q !== null && q !== 1);
  const resampled = last?.code === "r";
  // The target's own token follows the path.
  const grown = last && [...draft, { ...last, after: path.at(-1)?.place ?? 0 }];

  const tree = (test) => {
    const node = (token) => {
      const { text, code, p, q, place } = token;
      const shown = !place || test >= Math.min(decided[place], tests.length - 1);
      const chip = make("span", `sd-chip-of tok ${shown ? code : ""}`, line(text));
      if (tests[test]?.tried.includes(token)) chip.classList.add("on");
      const numbers = [test >= 0 && !greedy && `p ${share(p)}`, place && estimates && `q ${share(q)}`];
      return make("span", "sd-node", chip, make("small", "", numbers.filter(Boolean).join("\n")));
    };
    return nested(test >= tests.length - (resampled ? 1 : 0) ? grown : draft, node);
  };

  const drawDraft = () => {
    const { draft: drafting, verify: pass } = step.seconds;
    const sure = estimates ? " q is how sure the drafter is of a token." : "";
    const words =
      `The drafter guesses a tree of ${many(draft.length, "token")} in ${millis(drafting)}: where it is unsure, several tokens for one position.${sure} ` +
      `The target reads all branches in one pass of ${millis(pass)}. Then it follows its own tokens through the tree, up to the first that was not drafted.`;
    return [words, tree(-1)];
  };
  const drawTest = (test) => {
    const { own, tried } = tests[test];
    const one = tried.length === 1;
    const lost = draft.filter(({ code, place }) => code === "u" && decided[place] === test).length;
    const verdict =
      own.code === "a"
        ? `It is ${one ? "the token" : `one of the ${tried.length} tokens`} drafted there: accepted.`
        : `It is ${one ? `not ${quoted(tried[0].text)}, the token drafted there, which is` : `none of the ${tried.length} tokens drafted there, which are`} rejected. The target's own token replaces ${one ? "it" : "them"}.`;
    const discarded = lost ? ` ${many(lost, "token")} on the other branches ${lost === 1 ? "is" : "are"} discarded untested.` : "";
    const words = `After ${test ? quoted(path[test - 1].text) : "the text"}, ${step.drew(own)}. ${verdict}${discarded}`;
    return [words, tree(test), ...step.drawnFrom(places[test])];
  };
  const drawBonus = () => [
    `Nothing was drafted after ${quoted(path.at(-1).text)}, so one more token comes for free: ${step.drew(last)}.`,
    tree(tests.length),
    ...step.drawnFrom(places[tests.length]),
  ];

  const steps = [{ name: "draft", draw: drawDraft }];
  tests.forEach(({ own }, test) => steps.push({ name: `test ${test + 1}`, place: own.code === "a" ? test : draft.length, draw: () => drawTest(test) }));
  if (last?.code === "b") steps.push({ name: "bonus", place: draft.length, draw: drawBonus });
  return steps;
};

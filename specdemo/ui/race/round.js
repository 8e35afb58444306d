// A round of a lane, taken apart: the text before it, its draft, and what the target made of that. The opening and the
// step-through draw it as tiles.
import { line, make } from "../assets/page.js";

const TAIL = 60; // characters of the text before the round

/** The rounds of a lane; its first event is the token that comes with the pass over the prompt. */
export const roundsOf = ({ events }) => events.filter(({ seconds }) => seconds);

/** A round, by its place among those of `lane`. `path` is what is tested, from left to right, `tested` how many of it are;
 *  `last` is drawn after the draft: none if the text ended in it. */
export const roundOf = (lane, at) => {
  const rounds = roundsOf(lane);
  const { tokens, tree } = rounds[at];
  const draft = tokens.filter(({ place }) => place);
  const path = tree ? draft.filter(({ code }) => code === "a") : draft;
  const before = rounds.slice(0, at).flatMap((round) => round.tokens).filter(({ emitted }) => emitted);
  const letters = [...[...lane.events[0].tokens, ...before].map(({ text }) => text).join("")]; // a slice of the string could cut an emoji in two
  return {
    tokens,
    tree,
    draft,
    path,
    tested: path.filter(({ code }) => code !== "u").length,
    last: tokens.find(({ place }) => !place),
    text: (letters.length > TAIL ? "…" : "") + letters.slice(-TAIL).join(""),
    written: 1 + before.length,
    emitted: tokens.filter(({ emitted }) => emitted).length,
    stays: [0, ...path.map(({ place }) => place)],
  };
};

/** The text before a round and its tiles. What became of a guess shows from its own test on, those up to `place`. */
export const tiles = ({ text, draft, tree, path, tested, last }, place) => {
  const shown = (tree ? path.slice(0, place + 1) : draft).map(({ text: piece, code }, at) => {
    const failed = at > tested - 1 && place >= tested - 1;
    const tile = make("span", `sd-chip-of tok ${at <= place || failed ? code : ""}`, line(piece));
    if (at === place) tile.classList.add("on");
    return tile;
  });
  if (last && place >= draft.length) shown.push(make("span", `sd-chip-of tok ${last.code}`, line(last.text)));
  return [make("span", "sd-before", line(text)), ...shown];
};

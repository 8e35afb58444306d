// The reader of messages: gives names to what messages.py and playable.py send as rows.

/** A token of a text or of a draft.
 *  @typedef {object} Token
 *  @property {string} text
 *  @property {string} code its kind, see `KINDS`; empty where it is not known
 *  @property {boolean} emitted whether it is part of the text
 *  @property {?number} p the target's probability; null where it is not known, like `q` and `draw`
 *  @property {?number} q the drafter's probability
 *  @property {?number} draw the draw of its test
 *  @property {?number} place in the draft, from 1; null if it was not drafted
 *  @property {?number} after in a tree, the place of the token that it follows, 0 for the text */

/** A token that was possible at a place of the text.
 *  @typedef {object} Candidate
 *  @property {string} text
 *  @property {number} p
 *  @property {number} q
 *  @property {string} mark "g" for the drafted one that was tested, "d" for the one that was drawn instead, else empty
 *  @property {number} e its noise, see sampling.py */

/** A place of the text that a round wrote.
 *  @typedef {object} Place
 *  @property {?number} residual
 *  @property {Candidate[]} candidates */

/** What happened in a lane: the pass over the prompt, a round, or the end.
 *  @typedef {object} LaneEvent
 *  @property {number} at the time of the lane's clock after it
 *  @property {number} index of the round, from 0; -1 if it is none
 *  @property {number} k how many tokens were drafted
 *  @property {Token[]} tokens in reading order, those of a tree in the order of the draft
 *  @property {boolean} tree whether the draft is one
 *  @property {?{draft: ?number, verify: ?number, all: number}} seconds of a round
 *  @property {number} merged how many rounds it stands for
 *  @property {?object} figures of the lane so far
 *  @property {?object} ofAll the figures of all readers together
 *  @property {Place[]} places of a recording's round, as far as they are known */

/** @returns {Token} */
const readToken = ([text, code, p, q = null, draw = null, place = null, after = null]) => {
  const emitted = code !== "x" && code !== "u";
  return { text, code, emitted, p, q, draw, place, after };
};

/** @returns {Place} */
const readPlace = ([residual, candidates]) => ({ residual, candidates: candidates.map(([text, p, q, mark, e]) => ({ text, p, q, mark, e })) });

/** @returns {LaneEvent} */
export const readEvent = ({ at, row, seconds: parts, merged = 1, figures = null, of_all: ofAll = null, places = [] }) => {
  const [index, k, rows] = row ?? [-1, 0, []];
  const tokens = rows.map(readToken);
  const tree = tokens.some(({ after }) => after !== null);
  const [draft, verify, all] = parts ?? [];
  const seconds = parts ? { draft, verify, all } : null;
  return { at, index, k, tokens, tree, seconds, merged, figures, ofAll, places: places.map(readPlace) };
};

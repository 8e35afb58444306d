// Drafts that branch.
import { make } from "../assets/page.js";

/** The tokens that were drafted after the one of a place, 0 for the text; the likeliest comes first. */
export const behind = (tokens, place) => tokens.filter(({ after }) => after === place);

/** The likeliest path through a tree, after the token of a place. */
export const likeliest = (tokens, place = 0) => {
  const [token] = behind(tokens, place);
  return token ? [token, ...likeliest(tokens, token.place)] : [];
};

/** The emitted tokens of a round, each with those that were drafted for its place and those that are shown above it.
 *  After the end of a text there may be discarded ones that nothing follows. */
export const walk = ({ tokens, tree }) => {
  const steps = [];
  let [place, discarded] = [0, []];
  for (const token of tokens) {
    if (!token.emitted) {
      discarded.push(token);
      continue;
    }
    const tried = tree ? behind(tokens, place) : discarded.slice(0, 1);
    steps.push({ own: token, tried, discarded: tree ? tried.filter(({ code }) => code === "x") : discarded });
    [place, discarded] = [token.place, []];
  }
  if (discarded.length && !tree) steps.push({ own: null, tried: [], discarded });
  return steps;
};

/** A tree as nested lists. A token and its only child stand on one line, and branches hang under the token that they
 *  follow. `node` draws a token. */
export const nested = (tokens, node, place = 0) => {
  const items = behind(tokens, place).map((first) => {
    const item = make("li");
    for (let token = first, following; token; token = following.length === 1 && following[0]) {
      following = behind(tokens, token.place);
      item.append(following.length < 2 ? node(token) : make("div", "", node(token), nested(tokens, node, token.place)));
    }
    return item;
  });
  return make("ul", "sd-tree", ...items);
};

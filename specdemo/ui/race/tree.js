// Drafts that branch. A token of a tree has, after its own place, that of the token it follows, see messages.py.
export const PLACE = 5;
export const ABOVE = 6;

export const isEmitted = ([, code]) => !code || !"xu".includes(code);
export const isTree = (tokens) => tokens[0]?.length > ABOVE;
/** The tokens that were drafted after the one of a place, 0 for the text; the likeliest comes first. */
export const behind = (tokens, place) => tokens.filter((token) => token[ABOVE] === place);

/** The likeliest path through a tree, after the token of a place. */
export const likeliest = (tokens, place = 0) => {
  const [token] = behind(tokens, place);
  return token ? [token, ...likeliest(tokens, token[PLACE])] : [];
};

/** The emitted tokens of a round, each with those that were drafted for its place and those that are shown above it.
 *  After the end of a text there may be discarded ones that nothing follows. */
export const walk = (tokens) => {
  const tree = isTree(tokens);
  const places = [];
  let [place, discarded] = [0, []];
  for (const token of tokens) {
    if (!isEmitted(token)) {
      discarded.push(token);
      continue;
    }
    const tried = tree ? behind(tokens, place) : discarded.slice(0, 1);
    places.push([token, tried, tree ? tried.filter(([, code]) => code === "x") : discarded]);
    [place, discarded] = [token[PLACE], []];
  }
  if (discarded.length && !tree) places.push([null, [], discarded]);
  return places;
};

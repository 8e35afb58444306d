// One lane of an arena: its pane and the head above it.
import * as sd from "../assets/page.js";
import { Strip } from "./strip.js";
import { likeliest, walk } from "./tree.js";

const ALONE = "In each pass, the target writes one token.";
const DRAFTED = "In each pass, the target checks several of the drafter's guesses.";
const PASSES = ["Passes", "How often the target ran, including the pass that reads the prompt. A pass takes nearly the same time for one token as for several."];
const ENDINGS = { eos: "end of text", stop: "stop string", length: "token limit" };

/** One lane: its pane and the head above it. Events wait in `events` until the next frame. */
export class Lane {
  /** `place` is its place among the lanes, from 0: it decides its colour. */
  constructor(name, place) {
    this.node = sd.clone("sd-lane").firstElementChild;
    Object.assign(this.node.dataset, { lane: name, place });
    this.parts = sd.parts(this.node);
    const { pane, text, strip, passCount } = this.parts;
    this.strip = new Strip(strip);
    passCount.sdWhy = PASSES;
    this.guesses = sd.make("span", "sd-guesses");
    this.title(place ? "With a drafter" : "Target alone");
    text.dataset.empty = place ? DRAFTED : ALONE;
    const scrolled = () => {
      if (pane.scrollTop !== this.top) this.stuck = this.atBottom(); // by the reader, not by `scroll`
    };
    pane.addEventListener("scroll", scrolled, { passive: true });
    this.clear({});
  }

  title(text) {
    this.name = text;
    this.parts.title.textContent = text;
    this.parts.pane.setAttribute("aria-label", `Text of the lane: ${text}`);
  }

  /** `settings` are those of the run that begins. */
  clear({ max_new_tokens: max, rule }) {
    Object.assign(this, { max, rule, events: [], figures: null, ofAll: null, stuck: true });
    Object.assign(this, { passes: 0, tokens: 0, at: 0, clock: 0, promptSeconds: 0, pending: null, exact: false });
    this.counts = { a: 0, r: 0, b: 0, t: 0, x: 0, u: 0 };
    this.parts.text.replaceChildren();
    this.strip.clear();
    const [none, most] = max ? ["0", `of ${max} tokens`] : ["–", "tokens"];
    const shown = { state: "", rate: "–", passes: none, tokens: none, passWord: "passes", most, clock: "–" };
    for (const [part, text] of Object.entries(shown)) this.parts[part].textContent = text;
    this.parts.bar.style.transform = "scaleX(0)";
  }

  atBottom() {
    const { pane } = this.parts;
    const slack = this.pending ? 100 : 24; // guesses that reach into a line of their own
    return pane.scrollHeight - pane.scrollTop - pane.clientHeight < slack;
  }

  /** An event that is to be shown (see events.js); `ends` says whether it holds the end-of-text token. */
  take(event, ends) {
    const { tokens, at, seconds, merged, figures, ofAll } = event;
    if (seconds || !this.passes) {
      this.passes += merged;
      this.tokens += tokens.filter(({ emitted }) => emitted).length;
    }
    this.strip.take(event, this);
    if (tokens.length) this.events.push([event, ends]);
    this.at = at;
    this.figures = figures ?? this.figures;
    if (ofAll) this.ofAll = { at, figures: ofAll };
    this.exact = Boolean(figures); // whether the figures are those of this moment
  }

  /** The draft that the target reads at this moment, or nothing. */
  guess(event, ends) {
    this.pending = event ? [event, ends] : null;
  }

  /** Tokens after the first over the engine time after the prompt, see stats.Stats. */
  get rate() {
    if (this.exact) return this.figures.tokens_per_second;
    const seconds = this.at - this.promptSeconds;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  draw() {
    if (this.events.length) {
      const fragment = document.createDocumentFragment();
      for (const [event, ends] of this.events) fragment.append(this.round(event, ends));
      this.events = [];
      this.guesses.remove();
      this.drawn = null;
      this.parts.text.append(fragment);
    }
    this.drawGuesses();
  }

  drawGuesses() {
    const [event, ends] = this.pending ?? [null, false];
    if (event === this.drawn) return;
    this.drawn = event;
    this.guesses.remove();
    if (!event) return;
    const { tokens, tree } = event;
    const drafted = tree ? likeliest(tokens) : tokens.filter(({ place }) => place);
    const spans = drafted.map((token) => this.piece(token.text, "g", ends && token.code === "a" && token === tokens.at(-1)));
    this.guesses.replaceChildren(...spans);
    this.parts.text.append(this.guesses);
  }

  /** So that the newest text is in sight; guesses below it move nothing. */
  scroll() {
    if (!this.stuck) return;
    const { pane } = this.parts;
    if (this.guesses.isConnected && this.guesses.previousSibling) {
      const room = parseFloat(getComputedStyle(pane).paddingBottom);
      const range = document.createRange();
      range.selectNodeContents(this.guesses.previousSibling);
      pane.scrollTop += range.getBoundingClientRect().bottom + room - pane.getBoundingClientRect().bottom;
    } else pane.scrollTop = 1e9;
    this.top = pane.scrollTop;
  }

  /** To stay there, whatever is drawn. */
  scrollTo(top) {
    const { pane } = this.parts;
    pane.scrollTop = top;
    Object.assign(this, { top: pane.scrollTop, stuck: false });
  }

  drawFigures() {
    const { parts } = this;
    if (!this.passes) return;
    const shown = {
      rate: sd.number(this.rate, 1),
      passes: String(this.passes),
      passWord: this.passes === 1 ? "pass" : "passes",
      tokens: String(this.tokens),
      clock: `${this.clock.toFixed(2)} s`,
    };
    if (this.exact && this.figures.finish_reason) shown.state = ENDINGS[this.figures.finish_reason];
    for (const [part, text] of Object.entries(shown)) sd.put(parts[part], text);
    parts.bar.style.transform = `scaleX(${Math.min(1, this.tokens / this.max)})`;
  }

  /** The tokens of a round that had a draft are wrapped, so that pointing at one shows them all. A rejected one stays,
   *  and no line ends between it and what took its place. Whatever else was discarded shows where one points at it. */
  round(event, ends) {
    const { k, tokens, tree } = event;
    const group = k ? sd.make("span", "sd-rd") : document.createDocumentFragment();
    const newest = tokens.findLast(({ emitted }) => emitted);
    for (const { own, tried, discarded } of walk(event)) {
      const fork = tree ? sd.make("span", "sd-fork") : group;
      const span = (token) => {
        const span = this.piece(token.text, token.code, ends && token === newest);
        span.sdToken = { token, event, rule: this.rule, own, tried };
        return span;
      };
      const [wrong, ...others] = discarded[0]?.code === "x" ? discarded : [null, ...discarded];
      const ghost = others.length ? [sd.make("span", "sd-ghost", ...others.map(span))] : [];
      if (wrong && [wrong, own].some((token) => /^\s/.test(token?.text))) fork.append(sd.make("wbr")); // a line may end before both
      if (wrong) fork.append(sd.make("span", "sd-pair", sd.make("span", "sd-cut", span(wrong), ...ghost), ...(own ? [span(own)] : [])));
      else fork.append(...ghost, ...(own ? [span(own)] : []));
      if (tree) group.append(fork);
    }
    for (const { code } of tokens) if (code) this.counts[code] += 1;
    return group;
  }

  piece(text, code, isEnd) {
    const span = sd.make("span", `tok ${code}`, text);
    if (/^\n+$/.test(text)) span.classList.add("nl");
    if (!text) span.classList.add("part");
    if (isEnd) span.classList.add("end");
    return span;
  }
}

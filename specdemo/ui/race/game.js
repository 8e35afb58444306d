// Guess yourself: people are the drafter. A game is a race that begins anew at every guess, see game.py and guesses.py.
// The lanes of the other drafters stay hidden until it is over: they know what follows.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { press } from "../assets/top.js";
import { roundOf, roundsOf } from "./round.js";
import { nested } from "./tree.js";

const OPENING = 8; // rounds without a guess, with which it begins; as in game.py
const ROUNDS = 10; // after them, as there
const EXAMPLE = 2; // of its kind, by its place from 0: one that begins so that people can go on
const COUNT_MS = 1000; // between two counts of the votes
const LONGEST = 16; // characters of the text before the field

const startsWord = (text) => (/\s$/.test(text) ? "" : " ");
/** A guess after a text as it is meant: where the field begins with a space, one begins a word and none a comma. */
export const meant = (guess, text) => (startsWord(text) ? guess.replace(/^ +/, " ").replace(/^ (?=[.,;:!?])/, "") : guess);

const hasEnded = ({ figures }) => Boolean(figures?.finish_reason);

/** How many tokens a lane wrote in a pass, in its rounds that began after the opening. */
const perPass = (lane = { events: [] }) => {
  let [place, passes, tokens] = [0, 0, 0];
  for (const round of roundsOf(lane)) {
    const count = round.tokens.filter(({ emitted }) => emitted).length;
    if (place >= OPENING) [passes, tokens] = [passes + 1, tokens + count];
    place += count;
  }
  return passes ? tokens / passes : null;
};

const SAME = "The text is the target's own, whatever is guessed.";
const DRAWN = `${SAME} It draws each token by chance: p is the probability.`;
const COUNTED = `counted after the first ${OPENING + 1} tokens`; // which nobody guesses

/** What became of a round, in words. `p` writes the probability of a token where it is known. */
const sentence = ({ draft, tree, right, wrong, last, p }) => {
  const chip = (code, text) => sd.make("span", `tok ${code}`, text);
  const token = ({ code, text, p: known }) => [chip(code, `“${text.trim() || text}”`), p({ p: known })];
  if (!draft.length) return ["No guess: the target wrote ", ...(last ? token(last) : ["its end"]), " by itself."];
  const accepted = [`${sd.many(right, "token")} `, chip("a", "accepted")];
  if (!last) return [...accepted, ". The text ends."];
  if (last.code === "b") return [...accepted, ", and the same pass gives one more, the ", chip("b", "bonus"), ": ", ...token(last), "."];
  const after = tree ? 0 : draft.filter(({ code }) => code === "u").length;
  const untested = after ? [` ${sd.many(after, "token")} after it ${after === 1 ? "is" : "are"} `, chip("u", "untested"), "."] : [];
  const replaced = [...token(wrong), " is ", chip("x", "rejected"), ". The target wrote ", ...token(last), " in its place.", ...untested];
  return right ? [...accepted, ". Then ", ...replaced] : replaced;
};

export class Game {
  /** `send` is called with a guess; here it is tested, and a watcher votes. */
  constructor(race) {
    Object.assign(this, { race, since: COUNTED, node: sd.clone("sd-game").firstElementChild, playing: false, rounds: [], waits: false });
    this.parts = sd.parts(this.node);
    this.node.hidden = true;
    race.parts.front.after(this.node);
    this.text = ""; // of the lane of those who guess, as far as it has been shown
    this.field(false);
    this.send = () => this.test();
    this.parts.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.parts.guess.value);
    });
    this.parts.end.addEventListener("click", () => this.end());
  }

  // --- the person who plays

  /** A new game on the prompt of the form, or on another example where a recording has shown what follows it; in a game
   *  that goes on, the field. */
  async begin() {
    const { race } = this;
    if (this.playing) return this.focus();
    if (race.is("showing")) race.skip();
    if (race.busy) return;
    const seen = race.is("opening", "opened") && document.querySelector("#prompt textarea").value === race.show.request.prompt;
    Object.assign(this, { playing: true, known: null, values: null, rounds: Array.from({ length: OPENING }, () => []) });
    race.root.scrollIntoView({ block: "start" });
    if (seen) await page.pick(EXAMPLE);
    if (this.playing) this.ask();
  }

  /** Have the race run with all guesses so far. */
  ask() {
    this.field(false);
    this.asks = true;
    press("run");
  }

  /** Run was pressed: by a game, or to begin something else. */
  pressed() {
    if (!this.asks) this.end();
    this.asks = false;
  }

  /** The raw values of the form as the game began, with its guesses. */
  asked(values) {
    if (!this.playing) return values;
    this.values ??= values;
    return this.values.with(page.fields.length + 1, JSON.stringify(this.rounds));
  }

  /** What happens while nobody can guess. */
  get doing() {
    return this.rounds.at(-1).length ? "The target reads the guess." : "The target writes.";
  }

  /** Test the guess in the field, and those of the room. */
  async test() {
    if (!this.waits) return;
    const { value } = this.parts.guess;
    this.field(false);
    const votes = this.ballot ? await this.votes("DELETE") : null;
    this.ballot = null;
    if (!this.playing) return;
    this.rounds.push([...(this.isTyped(value) ? [meant(value, this.text)] : []), ...(votes?.guesses ?? [])]);
    this.ask();
  }

  /** What cannot be tested is not part of the game. */
  failed() {
    if (!this.playing) return;
    if (this.known === null) return this.end();
    this.rounds.length = this.known;
    this.field(true);
    this.count();
  }

  end() {
    if (!this.playing) return;
    if (this.ballot) this.votes("DELETE");
    Object.assign(this, { playing: false, ballot: null });
    this.field(false);
    if (this.known !== null) this.reveal();
  }

  // --- the room

  /** What the server answers on the votes of this page's watchers; null if it does not. */
  async votes(method) {
    const path = `/votes/${page.shares?.token}?${new URLSearchParams({ session: page.session })}`;
    return JSON.parse(await sd.fetched(path, { method }).catch(() => null));
  }

  /** Open a vote if the page shares its races, and count. */
  async count() {
    clearTimeout(this.counts);
    if (!this.waits) return;
    const token = page.shares?.token; // of which the ballot is, too
    const opens = token && this.ballot !== token;
    const found = token && (await this.votes(opens ? "POST" : "GET"));
    if (opens && found && !this.waits) return this.votes("DELETE"); // too late
    if (!this.waits) return;
    if (opens || !token) this.ballot = found ? token : null;
    const counted = found ? `Vote now: ${found.votes} of ${sd.many(found.watchers, "phone")} voted. Enter ends the vote.` : "The votes cannot be counted: share again.";
    sd.put(this.parts.room, token ? counted : "To let an audience guess on their phones, press Watch along.");
    this.counts = setTimeout(() => this.count(), COUNT_MS);
  }

  // --- what is shown

  /** Open the field for a guess, or close it. */
  field(open) {
    this.waits = open;
    this.parts.guess.disabled = this.parts.test.disabled = !open;
    if (open) return;
    clearTimeout(this.counts);
    sd.put(this.parts.room, "");
  }

  /** A key that is pressed outside the field: Enter tests the guess, and a letter goes into the field, if one is asked for;
   *  but F is for the stage. Returns whether the key is the game's. */
  key(key) {
    if (!this.playing || (key !== "Enter" && key.length > 1) || (this.waits && key.toLowerCase() === "f")) return false;
    if (key === "Enter") this.test();
    else this.focus();
    return true;
  }

  focus() {
    if (this.waits) this.parts.guess.focus({ preventScroll: true });
  }

  /** Ask for the next guess. */
  wait() {
    const { guess, before } = this.parts;
    const { text } = this;
    const tail = [...sd.line(text)].slice(-LONGEST).join("");
    before.textContent = `…${tail.replace(/^\S+(?=\s)/, "")}`;
    guess.value = startsWord(text);
    this.field(true);
  }

  /** Whether anything was typed. */
  isTyped(guess) {
    return Boolean(guess) && guess !== startsWord(this.text);
  }

  /** The messages of a race that is a game are taken together when it has ended: what is on the screen stays until then,
   *  and for good if the race was stopped before it had got as far. Returns those to take now. */
  taken(message) {
    if (message.start) this.held = message.start.guesses ? [] : null;
    if (!this.held) return [message];
    this.held.push(message);
    const { held } = this;
    if (!message.end && !message.error) return [];
    this.held = null;
    const { lanes, guesses } = held[0].start;
    const events = held.flatMap((each) => each.lanes?.[lanes[1]] ?? []);
    if (events.filter(({ seconds }) => seconds).length >= guesses.length || events.some(hasEnded)) return held;
    if (this.playing) this.race.over("Stopped.");
    return message.error ? [message] : [];
  }

  /** A race begins: a game hides the other lanes. */
  started({ guesses, prompt }) {
    this.node.hidden = !guesses;
    sd.put(this.parts.prompt, sd.line(prompt));
    this.race.root.toggleAttribute("data-game", Boolean(guesses));
  }

  /** The lane of those who guess. */
  get lane() {
    return this.race.show.lanes[this.race.stepped];
  }

  /** Who guesses: one person, or a room. */
  get who() {
    return sd.people(this.race.show.request.settings);
  }

  /** Tokens per pass: [name, value] of those who guess, and of the others. */
  get scores() {
    const { request, lanes } = this.race.show;
    const names = [this.who, ...request.more.map(({ drafter }) => drafter)];
    return Object.keys(this.race.lanes).slice(1).map((lane, at) => [names[at], perPass(lanes[lane])]);
  }

  /** The same in words. */
  get named() {
    return this.scores.map(([name, value]) => `${name} ${sd.number(value, 2)}`);
  }

  get score() {
    const [own, ...drafters] = this.named;
    return `${own}, ${drafters.length > 1 ? "drafters" : "drafter"} ${drafters.join(", ")}`;
  }

  /** All rounds so far are on the screen. */
  shown(end) {
    const { race } = this;
    const { guesses } = race.show.request;
    const played = guesses.length - OPENING;
    const tokens = this.lane.events.flatMap((event) => event.tokens.filter(({ emitted }) => emitted));
    this.text = tokens.map(({ text }) => text).join("");
    sd.put(this.parts.round, played ? `Round ${played} of ${ROUNDS}` : `${ROUNDS} rounds`);
    sd.put(this.parts.score, played ? `Tokens per pass: ${this.score}` : "How many tokens per pass do you get?");
    Object.assign(this, { ended: end, known: guesses.length });
    const [words, tiles] = played ? this.drawn(guesses.at(-1)) : [["Guess what the target, the model, writes next: a word or a few."], []];
    race.words("", race.show.request.settings.temperature ? DRAWN : SAME);
    race.parts.sentence.replaceChildren(...words);
    this.parts.draft.replaceChildren(...tiles);
    race.parts.spoken.textContent = race.parts.sentence.textContent;
    const left = this.race === page.race && !this.playing; // the player has ended the game while this round was read
    if (left || played >= ROUNDS || this.lane.events.some(hasEnded)) return this.over();
    if (!this.playing) return;
    this.wait();
    this.focus();
    this.count();
  }

  over() {
    if (this.playing) this.end();
    else this.reveal();
  }

  /** All lanes, and what came of it. */
  reveal() {
    const { race } = this;
    race.root.toggleAttribute("data-game", false);
    this.node.hidden = true;
    const [[who, own]] = this.scores;
    const last = race.parts.sentence.textContent;
    race.words(own ? `Tokens per pass: ${this.score}, ${COUNTED}.` : "The game is over.", own ? `${last} ${SAME}` : SAME);
    race.badge(this.ended.exactness.title, this.ended.exactness.mark);
    sd.put(race.parts.ratio, sd.number(own, 2));
    sd.put(race.parts.measure, `tokens per pass: ${who.toLowerCase()}`);
    race.parts.measure.sdWhy = null;
    race.drawNow();
    race.proof.show(this.ended.exactness);
    if (document.activeElement === document.body) race.parts.guess.focus({ preventScroll: true }); // the field is gone
  }

  /** What became of the last round, in words and as tiles. `guesses` are the texts that it tested. */
  drawn(guesses) {
    const { race } = this;
    const { temperature } = race.show.request.settings;
    const round = roundOf(race.show.lanes[race.stepped], roundsOf(this.lane).length - 1);
    const { draft, path, last, tree } = round;
    const p = (token) => (temperature ? ` (${sd.equals("p", token.p)})` : "");
    const right = draft.filter(({ code }) => code === "a").length;
    const end = path.at(-1)?.place ?? 0; // of the path that passed
    const wrong = draft.find(({ code, after }) => code === "x" && (!tree || after === end));
    const votes = this.counted(draft, guesses.length);
    const tile = (token) => {
      const small = [temperature && sd.equals("p", token.p), tree && token.place && sd.many(votes[token.place], "vote")].filter(Boolean);
      return sd.make("span", "sd-node", sd.make("span", `sd-chip-of tok ${token.code}`, sd.line(token.text)), sd.make("small", "", small.join("\n")));
    };
    const grown = last ? [...draft, { ...last, after: end }] : draft;
    const tiles = tree ? [nested(grown, tile)] : [...draft, ...(last ? [last] : [])].map(tile);
    return [sentence({ draft, tree, right, wrong, last, p }), tiles];
  }

  /** How many people guessed each token of a tree, by its place: q is their share of those who guessed what is before. */
  counted(draft, people) {
    const votes = [people];
    for (const { place, after, q } of draft) votes[place] = Math.round((q ?? 1) * (votes[after ?? 0] ?? 0));
    return votes;
  }
}

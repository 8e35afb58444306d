// The page of a watcher: an arena that plays the races of another page, one after the other.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { isDark } from "../assets/top.js";
import { Game, meant } from "../race/game.js";
import { Race } from "../race/race.js";
import { PACE, still } from "../race/show.js";
import { PASSES } from "../race/strip.js";
import { isLocal } from "./share.js";

const RELOAD_MS = 2000;
const VOTER = "specdemo-voter"; // under which the id of this tab is kept: who comes back has one vote
const REFUSED = { 404: "This page cannot vote now. Reload it.", 409: "The vote is over.", 429: "You voted just now. Try again in a second." };

/** The id that votes in this tab. */
const voterOf = () => {
  const made = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  try {
    return (sessionStorage[VOTER] ??= made);
  } catch {
    return made; // a browser may keep nothing
  }
};

const ENDED = "The sender has stopped sharing.";

class Watched extends Race {
  constructor(element, header) {
    super(element, () => {}, null);
    this.header = header;
    this.prompt = Object.assign(sd.make("p", "sd-prompt"), { tabIndex: 0 }); // a long one scrolls
    this.parts.front.before(this.prompt);
    this.parts.pace.value = this.show.pace = sd.kept(PACE) ?? (still() ? "once" : "real");
    this.words("Waiting for a race.", "It is shown here as soon as the sender presses Run.");
    this.game.send = (guess) => this.vote(guess);
    this.game.parts.end.hidden = true;
    this.game.parts.test.textContent = "Vote";
  }

  /** The sender asks for guesses, in the vote of this number, or no longer if that is 0. */
  asks(number) {
    if (number === this.ballot) return; // it is known already, and a guess may be half typed
    this.ballot = number;
    if (number && this.show.request?.guesses) this.game.wait();
    else this.game.field(false);
    sd.put(this.game.parts.room, number ? "Vote now: what comes next?" : "No vote is open.");
  }

  async vote(guess) {
    if (!this.game.isTyped(guess)) return;
    const body = JSON.stringify({ voter: this.voter, number: this.ballot, guess: meant(guess, this.game.text) });
    const answer = await fetch(`./votes/${this.token}`, { method: "PUT", body }).catch(() => null);
    sd.put(this.game.parts.room, answer?.ok ? `You voted ${sd.quoted(guess)}. You can change it until the vote ends.` : (REFUSED[answer?.status] ?? sd.UNREACHABLE));
  }

  /** A browser on another machine than the engine takes no time from it. */
  apply(message) {
    if (message.start) {
      message.start.shared &&= isLocal();
      sd.put(this.prompt, message.start.prompt);
    }
    super.apply(message);
    if (message.error) this.over(message.error, message.stopped ? "ended" : "failed");
  }

  /** The rounds of others are not stepped through here. */
  openRound() {}

  lay(...lanes) {
    super.lay(...lanes);
    for (const { strip } of Object.values(this.lanes)) strip.node.sdWhy = PASSES;
  }

  showState(words, live) {
    sd.put(this.header, words);
    this.header.toggleAttribute("data-live", live);
  }

  follow(token) {
    Object.assign(this, { token, voter: voterOf() });
    const source = new EventSource(`./watched/${token}?voter=${this.voter}`);
    source.addEventListener("vote", ({ data }) => this.asks(Number(data)));
    source.onopen = () => this.showState("Watching along, live", true);
    source.onmessage = ({ data }) => this.apply(JSON.parse(data));
    source.addEventListener("ended", () => {
      source.close();
      this.game.field(false);
      this.showState(ENDED, false);
      if (this.is("loading", "running")) this.over(ENDED);
    });
    source.onerror = () => {
      this.showState("The connection is lost. Trying again.", false);
      if (source.readyState === EventSource.CLOSED) setTimeout(() => window.location.reload(), RELOAD_MS); // the page then says why
    };
  }
}

page.Game = Game;
page.showStatus = () => {}; // nothing here shows the sender's model
document.body.classList.toggle("dark", isDark());
const header = document.querySelector(".sd-watch-state");
if (!header.textContent) {
  // or there is nothing to watch, and it says why
  const arena = sd.make("div", "sd-watched");
  document.querySelector("main").append(arena);
  new Watched(arena, header).follow(window.location.pathname.split("/").at(-1));
}

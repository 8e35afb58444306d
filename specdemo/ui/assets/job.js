// A job of the engine that this page has asked for, from the press of a button to its end. A race is one, and a study.
import * as sd from "./page.js";
import { page } from "./page.js";
import { placeInWords } from "./top.js";

/** All of the page. One that runs is named in the other tabs, with Stop. */
const jobs = () => [page.race, ...Object.values(page.lab)].filter(Boolean);
const running = () => jobs().find((job) => job.is("loading", "running"));
const waitsFor = () => `Waits for: ${running().name}.`.replace("?.", "?");

const elsewhere = sd.clone("sd-elsewhere").firstElementChild;
const { words: runs, stop } = sd.parts(elsewhere);
stop.addEventListener("click", () => running()?.stop());
const showElsewhere = () => {
  const job = running();
  elsewhere.hidden = !job || job.inSight;
  if (!elsewhere.isConnected) document.querySelector(".gradio-container")?.append(elsewhere);
  if (job) sd.put(runs, `${job.name} is running${job.progress ? `: ${job.progress}` : ""}`);
};

/** Each kind has its `kind`, its `name`, the `trigger` and `server` of its part of the page, `mark`, `words` and `apply`. */
export class Job {
  /** Watch its element, which has no height while its tab is not open. */
  lookAt(element) {
    const seen = (sights) => {
      this.inSight = sights.at(-1).boundingClientRect.height > 0;
      showElsewhere();
    };
    new IntersectionObserver(seen).observe(element);
  }

  say(state) {
    this.mark(state);
    showElsewhere();
  }

  /** How far it is, in words. */
  advance(words) {
    this.progress = words;
    showElsewhere();
  }

  is(...states) {
    return states.includes(this.state);
  }

  get busy() {
    return this.is("waiting", "loading", "running", "showing");
  }

  /** The raw values of the form, as they are sent. */
  asked(values) {
    return values;
  }

  /** Its button was pressed: the server reads the form. */
  press() {
    if (this.busy) return;
    this.run = null;
    this.begun = false;
    this.progress = "";
    this.say("waiting");
    this.words(running() ? waitsFor() : "Waiting for the model.");
    this.trigger("ask");
  }

  /** What the server answers: the `run` that may join the line, or why there is none. Stop may have been pressed
   *  meanwhile. */
  receive({ run, error }) {
    if (!this.is("waiting") || this.run) return;
    if (error) return this.over(error, "failed");
    this.follow(run);
    this.trigger("go");
  }

  /** Its place in line and then its messages, by server-sent events, see stream.py. What a lost connection misses, the
   *  browser asks for by itself; the run is lost when it gives up, or when there is no connection for too long. */
  follow(run) {
    this.run = run;
    const source = (this.source = new EventSource(sd.address(`/races/${run}`)));
    let waiting = null;
    source.onmessage = ({ data }) => this.hear(JSON.parse(data));
    source.onopen = () => {
      clearTimeout(waiting);
      waiting = null;
    };
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) return this.leave(sd.UNREACHABLE, "failed");
      waiting ??= setTimeout(() => source === this.source && this.leave(sd.UNREACHABLE, "failed"), page.LOST_MS);
    };
  }

  hear(message) {
    if (message.line) {
      const place = placeInWords(message.line);
      return running() ? this.words(waitsFor(), place) : this.words(place);
    }
    this.begun = true;
    this.apply(message);
    if (message.error) this.over(message.error, message.stopped ? "ended" : "failed");
    if (message.end || message.error) this.close();
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  /** It is over for this page: it leaves the line, or ends whenever the server hears of it. */
  leave(sentence, state) {
    this.close();
    if (this.run) this.server.halt(this.run);
    this.over(sentence, state);
  }

  /** Stop was pressed. What has begun ends by itself, within a second. */
  stop() {
    if (!this.busy) return;
    if (!this.begun) return this.leave("Stopped.");
    this.server.halt(this.run);
    this.words("Stopping.");
  }

  /** Gradio could not run it. */
  unable() {
    if (this.is("waiting") && !this.begun) this.leave(`The ${this.kind} could not be run.`);
  }

  /** It has failed, or it was stopped before it began: then it is over without a last message. */
  over(sentence, state = "ended") {
    if (!this.busy) return;
    this.say(state);
    this.words(sentence);
  }
}

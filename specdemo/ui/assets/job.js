// A job of the engine that this page has asked for, from the press of a button to its end. A race is one, and a study.
import * as sd from "./page.js";
import { page } from "./page.js";
import { askPlace, beforeInWords, placeInWords } from "./top.js";

/** All of the page. A job that waits hears its place in line; one that runs is named in the other tabs, with Stop. */
const jobs = () => [page.race, ...Object.values(page.lab)].filter(Boolean);
const running = () => jobs().find((job) => job.is("loading", "running"));
const waitsFor = () => `Waits for: ${running().name}.`.replace("?.", "?");
page.waits = (line) => jobs().find((job) => job.queued)?.placed(line);

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

  /** It waits in line, or is about to. */
  get queued() {
    return this.is("waiting") && !this.run;
  }

  placed(line) {
    const place = placeInWords(line);
    if (running()) this.words(waitsFor(), place);
    else this.words(place, beforeInWords(this.kind, line.before));
  }

  is(...states) {
    return states.includes(this.state);
  }

  get busy() {
    return this.is("waiting", "loading", "running", "showing");
  }

  /** Its button was pressed; nothing has come back yet. The values of the form go on to the server as they are. */
  wait(values) {
    if (this.busy) {
      this.cancelled = true; // Gradio calls it a failure that this one is not run
      throw new Error(`A ${this.kind} is waiting or running.`);
    }
    this.run = null;
    this.progress = "";
    this.say("waiting");
    this.words(running() ? waitsFor() : "Waiting for the model.");
    askPlace(() => this.queued);
    return values;
  }

  /** What the server answers to the press: that the job may join the line (`go`), the `run` to follow, or why
   *  there is none (`error`). Stop may have been pressed meanwhile. */
  told({ go, run, error }) {
    const waits = this.is("waiting");
    if (go && waits) this.trigger("go");
    else if (run && waits) this.follow(run);
    else if (run) this.server.halt(run);
    else if (error) this.over(error, "failed");
  }

  /** The run of this page, told by server-sent events, see stream.py. What a lost connection misses, the browser asks for
   *  by itself; the run is lost when it gives up, or when there is no connection for too long. */
  follow(run) {
    [this.run, this.cancelled] = [run, false];
    this.source?.close();
    const source = (this.source = new EventSource(sd.address(`/races/${run}`)));
    let waiting = null;
    source.onmessage = ({ data }) => this.hear(JSON.parse(data));
    source.onopen = () => {
      clearTimeout(waiting);
      waiting = null;
    };
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) return this.lost();
      waiting ??= setTimeout(() => source.readyState !== EventSource.CLOSED && this.lost(), page.LOST_MS);
    };
  }

  hear(message) {
    this.apply(message);
    if (message.error) this.over(message.error, message.stopped ? "ended" : "failed");
    if (message.end || message.error) this.source.close();
  }

  /** It ends, whenever the server hears of it, and Gradio forgets it, or it would run no other. */
  lost() {
    this.source.close();
    this.server.halt(this.run);
    this.cancel();
    this.over(sd.UNREACHABLE, "failed");
  }

  /** Stop was pressed. What has begun ends by itself, within a second. */
  stop() {
    if (this.run && this.busy) {
      this.server.halt(this.run);
      this.words("Stopping.");
    } else if (this.busy) {
      this.cancel();
      this.over("Stopped.");
    }
  }

  /** Gradio gives up what it runs for this page. It calls that a failure, maybe when the next one was asked for. */
  cancel() {
    this.cancelled = true;
    this.trigger("cancel");
  }

  /** Gradio could not run it. */
  unable() {
    if (!this.cancelled && !this.run) this.over(`The ${this.kind} could not be run.`);
    this.cancelled = false;
  }

  /** It has failed, or it was cancelled or never got into the queue: then it is over without a last message. */
  over(sentence, state = "ended") {
    if (!this.busy) return;
    this.say(state);
    this.words(sentence);
  }
}

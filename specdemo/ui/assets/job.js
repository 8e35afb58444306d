// A job of the engine that this page asks for: the race, or a study of the Lab.
import * as sd from "./page.js";
import { page } from "./page.js";
import { askPlace, beforeInWords, placeInWords } from "./top.js";

/** From the press of a button to its end. What fills a part of the page with it knows its `kind`, see status.py, the
 *  `trigger` and the `server` of the part, and how to `say` its state, to tell it in `words` and to `apply` a message. */
export class Job {
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
    this.say("waiting");
    this.words("Waiting for the model.");
    const waits = () => this.state === "waiting" && !this.run;
    page.waits = (line) => waits() && this.words(placeInWords(line), beforeInWords(this.kind, line.before));
    askPlace(waits);
    return values;
  }

  /** The run of this page. Its messages come as server-sent events, see stream.py. What a lost connection misses, the
   *  browser asks for by itself, until it gives up or there is no connection for too long. */
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
    this.cancel("forget");
    this.over(sd.UNREACHABLE, "failed");
  }

  /** Stop was pressed. What has begun ends by itself, after the step that it is at. */
  stop() {
    if (!this.busy) return;
    if (!this.run) {
      this.cancel("cancel");
      return this.over("Stopped.");
    }
    this.server.halt(this.run);
    this.words("Stopping after this step.");
  }

  /** Gradio gives up what it runs for this page. It calls that a failure, maybe when the next one was asked for. */
  cancel(event) {
    this.cancelled = true;
    this.trigger(event);
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

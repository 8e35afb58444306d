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

  /** Its button was pressed; nothing has come back yet. */
  wait() {
    if (this.busy) {
      this.cancelled = true; // Gradio calls it a failure that this one is not run
      throw new Error(`A ${this.kind} is waiting or running.`);
    }
    this.run = null;
    this.say("waiting");
    const waits = () => this.state === "waiting" && !this.run;
    page.waits = (line) => waits() && this.words(placeInWords(line), beforeInWords(this.kind, line.before));
    askPlace(waits);
  }

  /** The run of this page, whose messages come from now on. */
  follow(run) {
    [this.run, this.cancelled] = [run, false];
    this.source?.close();
    this.source = sd.listen(run, (message) => this.hear(message), () => this.lost());
  }

  hear(message) {
    this.apply(message);
    if (message.error && message.stopped) this.halted(message.error);
    else if (message.error) this.fail(message.error);
    if (message.end || message.error) this.source?.close();
  }

  /** Stop was pressed. What has begun ends by itself, after the step that it is at. */
  stop() {
    if (!this.busy) return;
    if (this.run) return this.words("Stopping after this step.");
    this.cancel("cancel");
    this.halted("Stopped.");
  }

  /** Gradio gives up what it runs for this page. It calls that a failure, maybe when the next one was asked for. */
  cancel(event) {
    this.cancelled = true;
    this.trigger(event);
  }

  /** This run ends, whenever the server hears of it, and Gradio forgets it, or it would run no other. */
  lost() {
    this.server.halt(this.run);
    this.cancel("forget");
    this.fail(sd.UNREACHABLE);
  }

  /** Gradio could not run it. */
  unable() {
    if (!this.cancelled && !this.run) this.halted(`The ${this.kind} could not be run.`);
    this.cancelled = false;
  }

  /** It is over without a last message: it was cancelled or never got into the queue. */
  halted(sentence) {
    if (!this.busy) return;
    this.say("ended");
    this.words(sentence);
  }

  fail(sentence) {
    this.say("failed");
    this.words(sentence);
  }
}

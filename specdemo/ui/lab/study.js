// A study of the Lab: what is said of it beside its button. What it has found is shown by Gradio's own parts.
import { Job } from "../assets/job.js";
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";

class Study extends Job {
  kind = "study";

  mark(state) {
    this.state = this.view.dataset.state = state;
  }

  words(sentence, more = "", failed = this.is("failed")) {
    sd.put(this.message, `${sentence} ${more}`.trim());
    this.message.toggleAttribute("data-failed", failed);
  }

  apply({ words, share, pictured = 0, end }) {
    if (this.is("waiting")) {
      this.say("running");
      this.words("");
      this.pictured = 0;
    }
    sd.put(this.at, words ?? "");
    this.advance(words ?? "");
    this.bar.value = share ?? 0;
    if (end) this.over(end);
    if (end || pictured > this.pictured) this.trigger("show");
    this.pictured = pictured;
  }
}

/** Its value is JSON: what a job receives, or what else there is to say in `words`. */
export const mountStudy = (element, props, watch, trigger, server) => {
  const study = (page.lab[props.study] = new Study());
  element.replaceChildren(sd.clone("sd-study"));
  Object.assign(study, { trigger, server, view: element.closest(".lab-view"), name: props.title, ...sd.parts(element) });
  study.lookAt(study.view);
  watch("value", () => {
    const value = JSON.parse(props.value || '{"words": ""}');
    if ("words" in value) study.words(value.words, "", value.failed);
    else study.receive(value);
  });
};

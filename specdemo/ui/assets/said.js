// What is said beside a button: where its work waits, how it has ended, or why it cannot be done.
import * as sd from "./page.js";
import { page } from "./page.js";
import { askPlace, beforeInWords, placeInWords } from "./top.js";

/** Its value is JSON: `words` or the sentence of an `error`, or the event by which a study joins the line (`go`), which
 *  then `waits` for the model. With a `button`, the id of one that begins a race, the arena says the same there as long as
 *  nothing runs. */
export const mountSaid = (element, props, watch, trigger) => {
  const line = Object.assign(sd.make("p", "sd-said"), { role: "status" });
  element.replaceChildren(line);
  const value = () => JSON.parse(props.value || "{}");
  const say = ({ words = "", error = "" }) => {
    sd.put(line, error || words);
    line.toggleAttribute("data-failed", Boolean(error));
  };
  if (props.button) page.beside[props.button] = say;
  watch("value", () => {
    const { go, waits } = value();
    if (go) return trigger(go);
    say(value());
    if (!waits) return;
    page.waits = (place) => value().waits && sd.put(line, `${placeInWords(place)} ${beforeInWords("study", place.before)}`);
    askPlace(() => value().waits);
  });
};

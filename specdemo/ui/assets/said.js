// What is said beside a button that begins a race, far from the arena.
import * as sd from "./page.js";
import { page } from "./page.js";

/** `button` is its id. What the arena says is said here, too, as long as nothing runs. */
export const mountSaid = (element, { button }) => {
  const line = Object.assign(sd.make("p", "sd-said"), { role: "status" });
  element.replaceChildren(line);
  page.beside[button] = ({ words = "", error = "" }) => {
    sd.put(line, error || words);
    line.toggleAttribute("data-failed", Boolean(error));
  };
};

// The dialog that shares a race, and the list of this browser's races.
import * as sd from "../assets/page.js";
import { page } from "../assets/page.js";
import { openDialog } from "../assets/top.js";
import { film, filmType } from "./film.js";
import { History } from "./history.js";
import { copyRace, mayFit, openRace, queryOf } from "./links.js";
import { Picture } from "./picture.js";

const FLASH_MS = 1500;
const PICTURES = ["picture", "card", "film"]; // of every race; the rest needs what the server keeps of an own one
const KEPT = ["saved", "trace", "raced"];
const GONE = "This race is no longer kept. Run it again to save it.";

class Share {
  constructor(element, trigger, server) {
    this.dialog = sd.clone("sd-share").firstElementChild;
    Object.assign(this, { trigger, server, parts: sd.parts(this.dialog), machine: "" });
    this.picture = new Picture(this.parts.picture);
    this.filmed = filmType(this.parts.picture);
    this.history = new History(element, (query) => this.again(query));
    const clicks = {
      card: () => this.card(),
      film: () => this.film(),
      saved: () => this.save(this.server.saved, "specdemo-race.html", "text/html"),
      trace: () => this.save(page.race.server.trace, "specdemo-trace.jsonl", "application/x-ndjson"),
      raced: async () => this.flash("raced", await this.kept(page.race.server.trace, copyRace)),
      link: () => this.trigger("link"),
    };
    for (const [name, act] of Object.entries(clicks)) this.parts[name].addEventListener("click", act);
    document.querySelector(".gradio-container").append(this.dialog);
    window.addEventListener("hashchange", openRace);
  }

  /** A race of this page is over; `values` are those of the form. */
  raced(race, values, end) {
    this.machine = (page.status?.facts ?? []).join(", ");
    if (!end.stopped && !race.show.request.guesses) this.history.add(race.show.request, end, values[page.fields.length] === "server" ? "" : queryOf(values));
  }

  open() {
    const { race } = page;
    const events = Object.values(race.show.lanes).flatMap(({ events }) => events);
    const [over, recorded] = [Boolean(race.result), race.is("opened")];
    this.parts.none.hidden = over;
    this.parts.message.textContent = "";
    for (const name of PICTURES) this.parts[name].hidden = !over;
    for (const name of KEPT) this.parts[name].hidden = !over || recorded;
    if (over) {
      this.parts.raced.hidden ||= !mayFit(events.length);
      this.parts.film.hidden = !this.filmed;
      this.picture.take(race, recorded ? race.opening.machine : this.machine);
      this.picture.draw();
    }
    openDialog(this.dialog);
  }

  /** What the server still has of the race; it says so if there is nothing. */
  async kept(answer, use) {
    const found = await answer(page.race.traceRun);
    this.parts.message.textContent = found ? "" : found === null ? GONE : sd.UNREACHABLE;
    return found && use(found);
  }

  save(answer, name, type) {
    return this.kept(answer, (text) => sd.save(text, name, type));
  }

  card() {
    this.picture.draw();
    this.parts.picture.toBlob((image) => sd.save(image, "specdemo-race.png", "image/png"), "image/png");
  }

  /** It is drawn where it can be seen, and ends if the dialog is closed: a race may begin. */
  async film() {
    const [type, ending] = this.filmed;
    const { film: button, card, picture } = this.parts;
    button.disabled = card.disabled = true;
    const draw = (share) => {
      this.picture.draw(share);
      sd.put(button, `Recording, ${sd.percent(share)}`);
    };
    const recorded = await film(picture, draw, type, () => !this.dialog.open);
    button.disabled = card.disabled = false;
    sd.put(button, "Download film");
    if (recorded) sd.save(recorded, `specdemo-race.${ending}`, type);
  }

  /** Say something on a button for a moment. */
  flash(name, words) {
    if (!words) return;
    const button = this.parts[name];
    button.dataset.usual ??= button.textContent;
    button.textContent = words;
    setTimeout(() => (button.textContent = button.dataset.usual), FLASH_MS);
  }

  /** Fill in the form as it was for an earlier race. */
  again(query) {
    this.query = query;
    this.trigger("again");
    document.querySelector("#run").focus();
  }
}

export const mountShare = (element, props, watch, trigger, server) => {
  page.share = new Share(element, trigger, server);
};

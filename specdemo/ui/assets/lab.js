// The Lab: a form for each question, a run at a time, and the pictures that come (see lab_run.py and lab_pictures.py).
(() => {
  const sd = window.specdemo;
  const TRY_MS = 150;
  const SHORT = 8; // rows; such a table is open from the start
  const NARROW = 900; // px; there the results lie below the form, see lab.css

  /** One control of a form, from its description in lab_views.py: `read`, `fill`, and the node. */
  class Control {
    constructor(field, view, changed) {
      this.field = field;
      this.node = sd.make("div", "sd-control");
      const id = `lab-${view}-${field.name}`;
      if (field.kind === "drafters") return this.boxes(id);
      const label = sd.make("label", "", field.label);
      label.htmlFor = id;
      const tag = { choice: "select", drafter: "select", text: "textarea" }[field.kind] || "input";
      this.input = sd.make(tag);
      this.input.id = id;
      if (tag === "input") Object.assign(this.input, { type: "number", min: field.low, max: field.high, step: field.kind === "whole" ? 1 : "any" });
      if (tag === "textarea") this.input.rows = 2;
      for (const [value, words] of Object.entries(field.choices || {})) this.input.append(new Option(words, value));
      this.node.append(label, this.input);
      if (field.info) this.node.append(sd.make("small", "", field.info));
      this.input.addEventListener("input", () => changed(field));
      if (field.value !== null) this.fill(field.value);
    }

    boxes(id) {
      this.node = sd.make("fieldset", "sd-control");
      this.node.id = id;
      this.node.append(sd.make("legend", "", this.field.label));
    }

    /** What the loaded preset can use is offered; the rest is there, greyed, with the reason. */
    offer(drafters, missing, own) {
      const chosen = this.read();
      const untouched = !this.touched;
      const able = (name) => !(name in missing);
      const usual = able(own) && own !== "none" ? own : drafters.find(able);
      if (this.input) {
        this.input.replaceChildren(
          ...drafters.map((name) => {
            const option = new Option(able(name) ? name : `${name} (${missing[name]})`, name);
            option.disabled = !able(name);
            return option;
          }),
        );
        this.input.value = untouched || !able(chosen) ? usual : chosen;
        this.input.onchange = () => (this.touched = true);
        return;
      }
      const legend = this.node.firstChild;
      this.node.replaceChildren(
        legend,
        ...drafters.map((name) => {
          const label = sd.make("label", "sd-check");
          const box = sd.make("input");
          Object.assign(box, { type: "checkbox", value: name, disabled: !able(name) });
          box.checked = able(name) && (untouched ? this.field.value === "all" || name === usual : chosen.includes(name));
          box.addEventListener("change", () => (this.touched = true));
          label.append(box, able(name) ? name : `${name} (${missing[name]})`);
          return label;
        }),
      );
    }

    read() {
      if (!this.input) return [...this.node.querySelectorAll("input:checked")].map((box) => box.value);
      const { value } = this.input;
      return this.input.type === "number" ? (value === "" ? null : Number(value)) : value;
    }

    fill(value) {
      this.input.value = typeof value === "number" ? +value.toPrecision(4) : value;
    }
  }

  /** One view: its form, its progress and what it shows. */
  class View {
    constructor(lab, spec) {
      this.lab = lab;
      this.spec = spec;
      this.node = sd.clone("sd-lab-view").firstElementChild;
      this.node.id = `lab-${spec.name}`;
      const find = (selector) => this.node.querySelector(selector);
      find(".sd-question").textContent = spec.words;
      this.parts = { run: find(".sd-lab-run"), stop: find(".sd-lab-stop"), bar: find("progress"), says: find(".sd-lab-says") };
      this.parts.files = find(".sd-files");
      this.parts.show = find(".sd-lab-show");
      this.controls = {};
      let group = "";
      const form = find(".sd-lab-fields");
      for (const field of spec.fields) {
        if (field.group !== group) form.append(sd.make("h3", "", (group = field.group)));
        const control = new Control(field, spec.name, () => this.changed(field));
        this.controls[field.name] = control;
        form.append(control.node);
      }
      this.parts.run.textContent = spec.run;
      this.parts.run.addEventListener("click", () => lab.run(this));
      this.parts.stop.addEventListener("click", () => lab.stop());
      for (const kind of ["json", "csv"]) find(`.sd-${kind}`).addEventListener("click", () => this.download(kind));
      find(".sd-lab-form").addEventListener("submit", (event) => event.preventDefault());
      if (spec.name === "theory") this.setUpTheory(find(".sd-lab-buttons"));
    }

    values() {
      return Object.fromEntries(Object.entries(this.controls).map(([name, control]) => [name, control.read()]));
    }

    says(words, state) {
      this.node.dataset.state = state;
      this.parts.says.ariaLive = state === "running" ? "off" : "polite"; // a countdown is not for the ear
      this.parts.says.textContent = words;
    }

    begin() {
      if (window.innerWidth <= NARROW) this.node.querySelector(".sd-lab-results").scrollIntoView({ behavior: "smooth" });
      this.parts.files.hidden = true;
      this.parts.bar.removeAttribute("value");
      this.job = this.latest = null;
      this.stopping = false;
      this.says("Waiting for the model. If it is busy, this starts afterwards.", "running");
    }

    apply(message) {
      if (message.status) sd.showStatus(message.status);
      if (message.status?.stage === "loading" && !this.stopping) this.says(`The model is not ready yet: ${message.status.words}.`, "running");
      if (message.progress) {
        const { done, of, words } = message.progress;
        if (done) this.parts.bar.value = done / of;
        if (!this.stopping) this.says(words, "running");
      }
      this.latest = message.picture || this.latest;
      const read = this.parts.show.querySelector(":focus-visible"); // with the keyboard: it stays until that goes on
      if (this.latest && (message.end || message.error || !read)) this.show(this.latest);
      if (message.values && Object.keys(message.values).length) this.measured(message.values);
      if (message.end) {
        const nothing = message.end.stopped && !message.picture;
        const until = nothing ? "There was nothing to show yet." : "This is what there was until then.";
        this.says(message.end.stopped ? `Stopped. ${until}` : "Done.", "ended");
        this.parts.files.hidden = nothing;
      }
      if (message.error) this.says(message.error, message.stopped ? "ended" : "failed");
    }

    show(picture) {
      const tables = () => [...this.parts.show.querySelectorAll("details")];
      const before = tables().map((details) => [details.open, details.lastChild.scrollTop]);
      this.latest = null;
      this.parts.show.replaceChildren(...picture.map(section));
      tables().forEach((details, place) => {
        [details.open, details.lastChild.scrollTop] = before[place] ?? [details.open, 0];
      });
    }

    /** What the server answers; Gradio gives nothing at all where it does not. */
    async ask(name, question) {
      return (await this.lab.server[name](question)) ?? { error: sd.UNREACHABLE };
    }

    async download(kind) {
      const { text, error } = await this.ask("file", { run: this.job, kind });
      if (error) return this.says(error, "failed");
      sd.save(text, `specdemo-${this.spec.name}.${kind}`, kind === "csv" ? "text/csv" : "application/json");
    }

    // --- the theory answers at once, and takes numbers from a race

    setUpTheory(buttons) {
      const button = sd.make("button", "sd-button sd-from-race", "Take my last race");
      button.type = "button";
      button.addEventListener("click", () => this.fromRace());
      buttons.append(button);
      this.tryNumbers();
    }

    changed(field) {
      if (!["draft_ms", "target_ms", "alpha"].includes(field.name)) return;
      if (field.name !== "alpha") this.passes = null; // measured for other costs
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.tryNumbers(), TRY_MS);
    }

    async tryNumbers() {
      if (this.node.dataset.state === "running") return;
      const asked = (this.asked = { ...this.values(), passes: this.passes, job: this.race });
      const { picture, error } = await this.ask("theory", asked);
      if (asked !== this.asked) return; // another number came in between
      if (error) return this.says(error, "failed");
      if (this.node.dataset.state === "failed") this.says("", "idle");
      this.show(picture);
    }

    async fromRace() {
      if (this.lab.busy === this) return;
      const { values, error } = await this.ask("numbers", sd.race?.traceRun || "");
      if (error) return this.says(error, "failed");
      this.race = sd.race.traceRun;
      this.measured({ ...values, passes: null });
      this.says("Numbers and measured point are those of the race that you ran last.", "idle");
      this.tryNumbers();
    }

    measured({ passes, ...values }) {
      this.passes = passes;
      if (passes) this.race = this.job;
      for (const [name, value] of Object.entries(values)) this.controls[name].fill(value);
    }
  }

  const section = ({ title, verdict, words, plots, tables }) => {
    const node = sd.make("section", "sd-lab-section");
    if (title) node.append(sd.make("h3", "", title));
    if (verdict) node.append(sd.make("p", "sd-verdict", verdict));
    const list = sd.make("ul", "sd-words");
    list.append(...words.map((line) => sd.make("li", "", line)));
    const grid = sd.make("div", "sd-plots");
    grid.append(...plots.filter(({ series, rows }) => (series || rows).length).map(sd.plot));
    node.append(list, grid, ...tables.filter(({ rows }) => rows.length).map(table));
    return node;
  };

  const table = ({ title, columns, rows }) => {
    const details = sd.make("details", "sd-card sd-table");
    details.open = rows.length <= SHORT;
    const scroller = sd.make("div");
    scroller.tabIndex = 0;
    const body = sd.make("table");
    const head = sd.make("tr");
    head.append(...columns.map(([name, format]) => sd.make("th", format ? "" : "sd-word", name)));
    body.append(head);
    for (const row of rows) {
      const line = sd.make("tr");
      line.append(...row.map((value, place) => sd.make("td", columns[place][1] ? "" : "sd-word", sd.format(value, columns[place][1]))));
      body.append(line);
    }
    scroller.append(body);
    details.append(sd.make("summary", "", title), scroller);
    return details;
  };

  /** The whole Lab inside one gr.HTML. One run at a time. */
  class Lab {
    constructor(element, props, trigger, server) {
      Object.assign(this, { root: element, props, trigger, server });
      element.classList.add("sd-lab");
      this.views = props.views.map((spec) => new View(this, spec));
      const choice = sd.make("div", "sd-choice");
      choice.setAttribute("role", "group");
      choice.setAttribute("aria-label", "Questions");
      this.buttons = this.views.map((view) => {
        const button = sd.make("button", "", view.spec.title);
        button.type = "button";
        button.addEventListener("click", () => this.open(view));
        return button;
      });
      choice.append(...this.buttons);
      element.replaceChildren(choice, ...this.views.map((view) => view.node));
      this.open(this.views[0]);
      sd.tooltips(element);
      this.preset();
    }

    open(view) {
      this.views.forEach((other, place) => {
        other.node.hidden = other !== view;
        this.buttons[place].setAttribute("aria-pressed", String(other === view));
      });
    }

    /** The chosen preset decides which drafters there are, as far as that is known by now. */
    preset() {
      const own = this.props.own[sd.preset] || "";
      const missing = (sd.status?.preset === sd.preset && sd.status.missing) || {};
      const known = JSON.stringify([own, missing]);
      if (known === this.known) return; // so that an open list stays open
      this.known = known;
      for (const view of this.views) {
        for (const control of Object.values(view.controls)) {
          if (control.field.kind.startsWith("drafter")) control.offer(this.props.drafters, missing, own);
        }
      }
    }

    run(view) {
      if (this.busy) return;
      view.begin();
      this.setBusy(view);
      this.props.value = JSON.stringify({ view: view.spec.name, values: view.values() });
      this.trigger("run");
    }

    setBusy(view) {
      this.busy = view;
      for (const { parts } of this.views) parts.run.disabled = Boolean(view);
      for (const other of this.views) other.parts.stop.disabled = other !== view;
    }

    answered({ run, error }) {
      const view = this.busy;
      if (!view || (!run && !error)) return;
      if (error) return this.finish(error, "failed");
      view.job = run;
      const take = (message) => {
        view.apply(message);
        if (message.end || message.error) this.finish();
      };
      this.source = sd.listen(run, take, () => this.finish(sd.UNREACHABLE, "failed"));
    }

    finish(words, state) {
      this.source?.close();
      if (words) this.busy?.says(words, state);
      this.setBusy(null);
    }

    /** A run ends after the step that it is at, with what there is until then. One that still waits is cancelled. */
    stop() {
      const view = this.busy;
      if (!view) return;
      view.parts.stop.disabled = true;
      if (view.job) {
        view.stopping = true;
        view.says("Stopping after this step.", "running");
        this.server.halt(view.job);
      } else {
        this.trigger("cancel");
        this.finish("Stopped.", "ended");
      }
    }
  }

  sd.mountLab = (element, props, watch, trigger, server) => {
    sd.lab = new Lab(element, props, trigger, server);
    watch("value", () => {
      const answer = JSON.parse(props.value || "{}");
      if (!answer.view) sd.lab.answered(answer);
    });
  };
})();

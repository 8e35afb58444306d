// Around the arena: the status line, the examples, links that prefill the form, and the keyboard.
(() => {
  const sd = window.specdemo;
  const press = (id) => document.querySelector(`#${id}`)?.click();

  // --- the line at the top

  sd.mountTop = (element, props, watch, trigger) => {
    const shade = chosenShade();
    if (shade) document.body.classList.toggle("dark", shade === "dark");
    const top = sd.clone("sd-top").firstElementChild;
    element.replaceChildren(top);
    top.querySelector(".sd-dark").addEventListener("click", sd.toggleDark);
    top.querySelector(".sd-help").addEventListener("click", sd.showHelp);
    const retry = top.querySelector(".sd-retry");
    retry.addEventListener("click", () => trigger("retry"));
    const [progress, model, facts] = [".sd-progress", ".sd-model", ".sd-facts"].map((name) => top.querySelector(name));
    sd.showStatus = (status) => {
      sd.status = status;
      sd.lab?.preset();
      top.dataset.stage = status.stage;
      sd.put(model, status.stage === "ready" ? status.words : sd.sentence(status.words));
      sd.put(facts, (status.facts || []).join(" · "));
      retry.hidden = status.stage !== "failed";
      progress.hidden = status.stage !== "loading";
      if (status.fraction === null) progress.removeAttribute("value");
      else progress.value = status.fraction;
    };
    const read = () => props.value && sd.showStatus(JSON.parse(props.value));
    watch("value", read);
    read();
  };

  sd.sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

  // --- dark or light: as the address says, else as it was chosen here, else as Gradio found it

  const SHADE = "specdemo-shade";

  sd.toggleDark = () => {
    const dark = document.body.classList.toggle("dark");
    try {
      localStorage.setItem(SHADE, dark ? "dark" : "light");
    } catch {} // a browser that keeps nothing
  };

  const chosenShade = () => {
    if (new URLSearchParams(window.location.search).has("__theme")) return null;
    try {
      return localStorage.getItem(SHADE);
    } catch {
      return null;
    }
  };

  // --- the examples

  sd.mountExamples = (element, props, trigger) => {
    const categories = sd.make("div", "sd-categories");
    categories.setAttribute("role", "group");
    categories.setAttribute("aria-label", "Kinds of examples");
    const prompts = sd.make("div", "sd-prompts");
    prompts.setAttribute("role", "group");
    prompts.setAttribute("aria-label", "Examples");
    const open = (category) => {
      for (const button of categories.children) button.setAttribute("aria-pressed", String(button.textContent === category));
      prompts.replaceChildren(
        ...props.prompts[category].map((prompt) => {
          const chip = sd.make("button", "sd-chip", prompt);
          chip.type = "button";
          chip.title = prompt;
          chip.addEventListener("click", () => {
            props.value = prompt;
            trigger("pick");
          });
          return chip;
        }),
      );
      prompts.scrollLeft = 0;
    };
    for (const category of Object.keys(props.prompts)) {
      const button = sd.make("button", "sd-category", category);
      button.type = "button";
      button.addEventListener("click", () => open(category));
      categories.append(button);
    }
    element.replaceChildren(categories, prompts);
    if (categories.firstChild) open(categories.firstChild.textContent);
  };

  // --- links: they fill the form and never run anything

  const FIELDS = ["prompt", "preset", "drafter", "k", "auto", "temperature", "max_new_tokens", "seed", "top_k", "top_p", "stop", "mode", "order"];
  const NUMBERS = new Set(["k", "temperature", "max_new_tokens", "seed", "top_k", "top_p"]);

  const LONGEST_LINK = 8000; // what servers and those before them take
  const LONGEST_NAMED = 60;

  /** The preset that was chosen, null if it is the one that the form had. */
  sd.chose = (preset) => {
    if (preset === sd.preset) return null;
    sd.preset = preset;
    sd.lab?.preset();
    return preset;
  };

  /** The preset to load after a choice, null if that was asked for already. */
  sd.wanted = (preset) => {
    if (preset === sd.asked) return null;
    sd.asked = preset;
    return preset;
  };

  /** Run was pressed. The values go on to the server as they are. */
  sd.pressed = (values) => {
    sd.race.waiting();
    return values;
  };

  /** The page was opened: what the form begins with, and where the address says something that can be used, that. */
  sd.opened = ({ choices, starting, notes }, values) => {
    document.body.classList.add("sd-open");
    window.restFrames?.();
    const query = new URLSearchParams(window.location.search);
    const ignored = [];
    const k = query.get("k");
    const begun = new Map(Object.entries(starting[query.get("preset")] ?? {}));
    const filled = FIELDS.map((name, place) => {
      const usual = begun.has(name) ? begun.get(name) : values[place];
      if (name === "auto") return k === "auto" || (usual && !(k && Number.isFinite(Number(k))));
      if (!query.has(name) || (name === "k" && k === "auto")) return usual;
      const text = query.get(name);
      if (NUMBERS.has(name) ? text.trim() && Number.isFinite(Number(text)) : !choices[name] || choices[name].includes(text)) {
        return NUMBERS.has(name) ? Number(text) : text;
      }
      ignored.push(`${name}=${text.length > LONGEST_NAMED ? `${text.slice(0, LONGEST_NAMED)}…` : text}`);
      return usual;
    });
    if (ignored.length) sd.race?.words("Part of the link cannot be used and was left out.", ignored.join(", "));
    else if (FIELDS.some((name) => query.has(name))) sd.race?.words("The form was filled in from a link.", "Press Run to start.");
    else if (notes.length) sd.race?.words("Some files could not be read.", notes.join(" "));
    sd.chose((sd.asked = filled[FIELDS.indexOf("preset")]));
    return filled;
  };

  sd.copyLink = async (values) => {
    const query = new URLSearchParams();
    FIELDS.forEach((name, place) => query.set(name, values[place] ?? ""));
    if (query.get("auto") === "true") query.set("k", "auto");
    query.delete("auto");
    const link = `${window.location.origin}${window.location.pathname}?${query}`;
    if (link.length > LONGEST_LINK) return sd.flash(".sd-link", "Too long for a link");
    try {
      await navigator.clipboard.writeText(link);
      sd.flash(".sd-link", "Copied");
    } catch {
      window.prompt("Copy this link:", link);
    }
  };

  sd.flash = (selector, words) => {
    const button = document.querySelector(selector);
    if (!button || button.dataset.usual) return;
    button.dataset.usual = button.textContent;
    button.textContent = words;
    setTimeout(() => {
      button.textContent = button.dataset.usual;
      delete button.dataset.usual;
    }, 1500);
  };

  // --- help and keys

  sd.showHelp = () => {
    let dialog = document.querySelector(".sd-dialog");
    if (!dialog) {
      dialog = sd.clone("sd-help").firstElementChild;
      const list = dialog.querySelector(".sd-kinds");
      for (const [code, name, words] of sd.KINDS) {
        const term = sd.make("dt");
        term.append(sd.make("span", `tok ${code}`, name));
        list.append(term, sd.make("dd", "", words));
      }
      document.querySelector(".gradio-container").append(dialog);
    }
    if (dialog.open) return;
    dialog.showModal();
    dialog.querySelector("h2").focus(); // the browser chooses the only button, at its end
    dialog.scrollTop = 0;
  };

  const KEYS = { d: sd.toggleDark, "?": sd.showHelp };
  const RACE_KEYS = { r: () => press("run"), s: () => press("stop"), h: () => sd.race.hide.click() };
  const raceShows = () => Boolean(sd.race?.root.offsetParent); // and not another tab
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.repeat && event.target.closest?.("#prompt")) {
      event.preventDefault();
      return press("run");
    }
    const typing = event.target.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable], dialog[open]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const key = event.key.toLowerCase();
    const act = KEYS[key] || (raceShows() && RACE_KEYS[key]);
    if (!act) return;
    event.preventDefault();
    act();
  });
})();

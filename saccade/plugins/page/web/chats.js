// The list of conversations, and the current one of this tab.

import { button, byId, bytes, element } from "./dom.js";
import { forget, headOf, heads, keep, load, NotKept, rename } from "./store.js";
import { asJson, asMarkdown, download, fromJson } from "./transfer.js";

const TAB = "saccade-tab";

export class Chats {
  /** on: {turns(), show(turns), settle(), tell(about, words)}: the conversation that is shown; show
   * another; end the answer that comes; say what went wrong about something ("": it is over). */
  constructor(on) {
    this.on = on;
    this.others = new BroadcastChannel("saccade-chats"); // tabs with the same list
    this.others.onmessage = () => this.refresh();
    byId("search").addEventListener("input", () => this.#list());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", async ({ target }) => {
      const files = [...target.files];
      target.value = "";
      for (const file of files) await this.import(file);
    });
    byId("chat-list").addEventListener("scroll", () => byId("chat-menu").hidePopover());
    this.heads = [];
    this.unkept = new Map(); // by id, {head, turns} of those for which the browser had no room
    this.renaming = null;
  }

  /** The conversation that this tab shows. */
  get id() {
    let id = sessionStorage.getItem(TAB);
    if (!id) {
      id = [...crypto.getRandomValues(new Uint8Array(8))].join("-");
      sessionStorage.setItem(TAB, id);
    }
    return id;
  }

  /** The turns that this tab showed before a reload. */
  turns() {
    return load(this.id);
  }

  /** Store the turns of the conversation. */
  keep(turns) {
    return this.#keep(this.id, turns);
  }

  async #keep(id, turns, title = null) {
    const keeping = () => (turns.length ? keep(id, turns, title) : forget(id));
    if (await this.#try(keeping)) this.unkept.delete(id);
    else this.unkept.set(id, { head: headOf(id, turns), turns });
    this.#list();
  }

  /** Start a new conversation. */
  begin() {
    sessionStorage.removeItem(TAB);
    this.on.show([]);
    this.#list();
  }

  async open(id) {
    await this.on.settle();
    const turns = await this.#turnsOf(id);
    sessionStorage.setItem(TAB, id);
    this.on.show(turns);
    this.#list();
  }

  async forget(id) {
    if (id === sessionStorage.getItem(TAB)) {
      await this.on.settle();
      this.begin();
    }
    this.unkept.delete(id);
    await this.#try(() => forget(id));
    for (const [other, { turns }] of this.unkept) await this.#keep(other, turns); // there is room now
    byId("search").focus();
  }

  async import(file) {
    try {
      const { title, turns } = await fromJson(file);
      await this.on.settle();
      this.begin();
      this.on.show(turns);
      await this.#keep(this.id, turns, title);
    } catch (error) {
      this.on.tell("import", `${file.name} was not imported: ${error.message}.`);
    }
  }

  /** Reload the list. */
  async refresh() {
    this.heads = await heads();
    if (this.renaming === null) this.#list();
  }

  #turnsOf(id) {
    return id === this.id ? this.on.turns() : (this.unkept.get(id)?.turns ?? load(id));
  }

  /** Change what is kept, and show it; whether it was kept: else that is said. */
  async #try(act) {
    let words = "";
    try {
      await act();
    } catch (error) {
      if (!(error instanceof NotKept)) throw error;
      words = error.message;
    }
    this.on.tell("storage", words);
    this.others.postMessage("");
    await this.refresh();
    return !words;
  }

  #list() {
    const wanted = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const unkept = [...this.unkept.values()].map(({ head }) => head);
    const all = [
      ...unkept.map((head) => ({ ...head, title: `${head.title} (not saved)` })),
      ...this.heads.filter(({ id }) => !this.unkept.has(id)),
    ];
    const found = all.filter(({ title, words }) =>
      wanted.every((word) => words.includes(word) || title.toLowerCase().includes(word)),
    );
    const list = byId("chat-list");
    const focus = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...found.map((head) => this.#item(head)));
    if (focus) refocus(list, focus);
    const size = this.heads.reduce((sum, head) => sum + head.size, 0);
    byId("kept").textContent = this.heads.length
      ? `${this.heads.length} saved in this browser, ${bytes(size)}`
      : "Conversations are saved in this browser.";
    byId("none-found").hidden = !wanted.length || found.length > 0;
  }

  #item(head) {
    const { id, title } = head;
    const item = element("li", { "data-id": id });
    if (this.renaming === id) {
      item.append(this.#renameField(head));
      return item;
    }
    const shown = id === sessionStorage.getItem(TAB) ? { "aria-current": "true" } : {};
    const more = button("⋯", (pressed) => this.#fillMenu(head, pressed), {
      class: "more",
      title: "More",
      "aria-label": `More for ${title}`,
      popovertarget: "chat-menu",
    });
    item.append(button(title, () => this.open(id), { class: "chat", title, ...shown }), more);
    return item;
  }

  /** The menu of a conversation, next to the button that opens it. */
  #fillMenu({ id, title }, opener) {
    const menu = byId("chat-menu");
    const choice = (words, act) => button(words, () => (menu.hidePopover(), act()));
    menu.replaceChildren(
      choice("Rename", () => {
        this.renaming = id;
        this.#list();
        byId("chat-list").querySelector("input")?.select();
      }),
      choice("Export as JSON", async () =>
        download(title, "json", await asJson({ title, turns: await this.#turnsOf(id) })),
      ),
      choice("Export as Markdown", async () =>
        download(title, "md", asMarkdown({ title, turns: await this.#turnsOf(id) })),
      ),
      this.#deleteButton(id),
    );
    const { left, top, bottom } = opener.getBoundingClientRect();
    const above = bottom > innerHeight / 2;
    menu.style.left = `min(${left}px, 100vw - 12rem)`;
    menu.style.top = above ? "auto" : `${bottom}px`;
    menu.style.bottom = above ? `${innerHeight - top}px` : "auto";
  }

  /** The first click asks for confirmation, the second deletes. */
  #deleteButton(id) {
    return button("Delete", (made) => {
      if (made.textContent === "Delete") made.textContent = "Confirm delete";
      else byId("chat-menu").hidePopover(), this.forget(id);
    });
  }

  #renameField({ id, title }) {
    const field = element("input", { "aria-label": "Title", value: title, maxlength: "80" });
    const done = async (keeps) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      const given = field.value.trim();
      if (keeps && given && given !== title) await this.#try(() => rename(id, given));
      else this.#list();
    };
    field.addEventListener("keydown", (event) => {
      if (!["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      done(event.key === "Enter");
    });
    field.addEventListener("blur", () => done(true));
    return field;
  }
}

/** Focus the element at the position of the removed one. */
function refocus(list, before) {
  const { id } = before.closest("li")?.dataset ?? {};
  for (const each of list.querySelectorAll("li button"))
    if (each.closest("li").dataset.id === id && each.textContent === before.textContent) each.focus();
}

// The input box: the question's text, its files, and notices about them.

import { button, byId, element } from "./dom.js";
import { read, shown } from "./files.js";
import { Notices } from "./notices.js";

export class Composer {
  /** submit: called with a complete question. */
  constructor(submit) {
    this.submit = submit;
    this.images = []; // videos and PDFs, too, that go with the question
    this.takes = null; // the kinds of files that the server takes, once it has said so
    this.notices = new Notices(byId("notice"));
    this.editing = null; // the turn that it replaces
    this.reading = Promise.resolve();
    this.question = byId("question");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      submit();
    });
    byId("add").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", ({ target }) => {
      this.add([...target.files]);
      target.value = "";
    });
    byId("keep").addEventListener("click", () => this.clear());
    this.#wireTransfers();
  }

  /** Add files one after the other, so that they are sent in the order in which they were added. */
  add(files, sure = false) {
    this.reading = this.reading.then(async () => {
      const leftOut = new Map(); // why: files
      for (const file of files) {
        try {
          this.images.push(await read(file, this.takes, sure));
          this.#showTray();
        } catch (error) {
          leftOut.set(error.message, [error, [...(leftOut.get(error.message)?.[1] ?? []), file]]);
        }
      }
      for (const [{ message, sure }, files] of leftOut.values()) this.#tell(files, message, sure);
    });
    return this.reading;
  }

  /** Report files that were not added. sure: offer to add them anyway. */
  #tell(files, why, sure) {
    const were = files.length > 1 ? "were" : "was";
    const words = `${files.map(({ name }) => name).join(", ")} ${were} not added: ${why}.`;
    this.notices.add("left out", words, sure ? ["Add anyway", () => this.add(files, true)] : null);
  }

  /** Whether the user confirmed that some files are not sent; otherwise a notice asks. */
  confirmed() {
    if (!this.notices.has("left out")) return true;
    const without = () => {
      this.notices.clear("left out", "not sent");
      this.submit();
    };
    this.notices.clear("not sent");
    this.notices.add("not sent", "The question was not sent.", ["Send without it", without]);
    return false;
  }

  /** Fill the box. editing: the turn that the question replaces, or null. */
  set(text, images, editing = null) {
    this.question.value = text;
    this.images = images;
    this.editing = editing;
    byId("editing").hidden = editing === null;
    for (const [i, turn] of [...byId("talk").children].entries())
      turn.classList.toggle("replaced", editing !== null && i >= editing);
    this.#showTray();
  }

  clear() {
    this.set("", []);
    this.notices.dismiss();
    this.focus();
  }

  /** Focus the box, except on touch screens, where the keyboard would open. */
  focus() {
    if (matchMedia("(hover: hover)").matches) this.question.focus();
  }

  busy(yes) {
    byId("send").hidden = yes;
    byId("stop").hidden = !yes;
    document.body.classList.toggle("busy", yes);
  }

  #showTray() {
    byId("tray").replaceChildren(
      ...this.images.map((image) => {
        const leaveOut = () => {
          this.images = this.images.filter((each) => each !== image);
          this.notices.clear("failure");
          this.#showTray();
          this.focus();
        };
        const away = button("×", leaveOut, {
          class: "away",
          "aria-label": `Remove ${image.name}`,
        });
        return element("span", { class: "waiting" }, shown(image), away);
      }),
    );
    byId("tray").scrollLeft = byId("tray").scrollWidth;
  }

  #wireTransfers() {
    const dropping = (yes) => document.body.classList.toggle("dropping", yes);
    for (const name of ["dragenter", "dragover"])
      document.addEventListener(name, (event) => {
        event.preventDefault();
        dropping(true);
      });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) dropping(false);
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      dropping(false);
      this.add([...(event.dataTransfer?.files ?? [])]);
    });
    document.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length) event.preventDefault();
      this.add(files);
    });
  }
}

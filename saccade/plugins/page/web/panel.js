// A panel next to the chat, and the button that opens and closes it.

import { byId } from "./dom.js";

export class Panel {
  /** Open on a wide screen, and otherwise when its button is pressed. */
  constructor(id, buttonId) {
    this.place = byId(id);
    this.button = byId(buttonId);
    const wide = matchMedia("(min-width: 1100px)");
    this.open(wide.matches);
    wide.addEventListener("change", () => this.open(wide.matches));
    this.button.addEventListener("click", () => this.open(this.place.hidden));
  }

  open(yes) {
    this.place.hidden = !yes;
    this.button.setAttribute("aria-expanded", yes);
  }

  /** Close the panel if it covers the chat, as on a phone. Returns whether it was closed. */
  uncover() {
    const covers = !this.place.hidden && getComputedStyle(this.place).position === "absolute";
    if (covers) this.open(false);
    return covers;
  }
}

// A panel beside the chat, and the button that opens and closes it.

import { byId } from "./dom.js";

export class Panel {
  /** It is there on a wide screen, and elsewhere when its button is pressed. */
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

  /** Close it if it lies over the chat, as it does on a phone; says whether it did. */
  uncover() {
    const covers = !this.place.hidden && getComputedStyle(this.place).position === "absolute";
    if (covers) this.open(false);
    return covers;
  }
}

// What there is to say above the question. A notice stays until it is dismissed, or until what it
// speaks of is over.

import { button, element } from "./dom.js";

export class Notices {
  /** place: the element that they are shown in. */
  constructor(place) {
    this.place = place;
    this.all = []; // [kind, element]
  }

  /** Say something. kind: what it is about; act: a button's words, and what it does. */
  add(kind, words, act = null) {
    const shown = element("p", {}, element("span", {}, words));
    const dismiss = () => this.#keep(([, each]) => each !== shown);
    if (act) shown.append(button(act[0], () => (dismiss(), act[1]())));
    shown.append(button("×", dismiss, { class: "away", "aria-label": "Dismiss" }));
    this.all.push([kind, shown]);
    this.place.append(shown);
    this.place.hidden = false;
  }

  has(kind) {
    return this.all.some(([each]) => each === kind);
  }

  /** What these kinds were about is over. */
  clear(...kinds) {
    this.#keep(([kind]) => !kinds.includes(kind));
  }

  /** Dismiss all. */
  dismiss() {
    this.#keep(() => false);
  }

  #keep(stays) {
    this.all = this.all.filter(stays);
    this.place.replaceChildren(...this.all.map(([, shown]) => shown));
    this.place.hidden = !this.all.length;
  }
}

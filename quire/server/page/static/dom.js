// Makes and finds elements.

export const byId = (id) => document.getElementById(id);

/** @returns {HTMLElement} */
export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** @param {(event: Event) => void} onClick @returns {HTMLButtonElement} */
export function button(label, onClick, className = "") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** A button that shows a symbol, with a label for screen readers and the pointer. */
export function iconButton(symbol, label, onClick, className = "icon") {
  const made = button(symbol, onClick, className);
  made.setAttribute("aria-label", label);
  made.title = label;
  return made;
}

/** Tells the user of a problem, below other elements. @returns {HTMLElement} */
export function problem(message) {
  const made = element("p", "notice problem", message);
  made.setAttribute("role", "alert");
  return made;
}

/** Asks in a dialog. @returns {Promise<boolean>} whether the user agrees */
export function agrees(question, action, refusal) {
  const dialog = element("dialog", "question");
  const row = element("form", "row");
  row.method = "dialog";
  const yes = element("button", "primary", action), no = element("button", "", refusal);
  yes.value = "yes";
  row.append(yes, no);
  dialog.append(element("p", "", question), row);
  dialog.setAttribute("aria-label", question);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes"); });
  });
}

/** Gives the user a file. */
export function download(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

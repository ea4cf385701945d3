// Pictures that go with the next message: chosen as files, and shown small.

const byId = (id) => document.getElementById(id);
let chosen = []; // { name, url }: url is a data: URL

export function start(problem) {
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // so that the same file can be chosen again
    try {
      chosen = [...chosen, ...await Promise.all(files.map(read))];
    } catch (error) {
      problem(error.message);
    }
    show();
  });
}

export function count() { return chosen.length; }

// The chosen pictures. The next message has none.
export function take() {
  const taken = chosen;
  chosen = [];
  show();
  return taken;
}

// The content of a message: a text, or its parts.
export function content(text, pictures = chosen) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

export function thumbnail({ name, url }) {
  return Object.assign(document.createElement("img"), { src: url, alt: `Picture ${name}`, title: name });
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}

function show() {
  byId("pictures").replaceChildren(...chosen.map((picture) => {
    const item = document.createElement("li");
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    remove.setAttribute("aria-label", `Remove picture ${picture.name}`);
    remove.addEventListener("click", () => {
      chosen = chosen.filter((other) => other !== picture);
      show();
      byId("attach").focus();
    });
    item.append(thumbnail(picture), remove);
    return item;
  }));
  byId("pictures").hidden = !chosen.length;
}

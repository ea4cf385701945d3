// The options of requests: the model, the system message, sampling, tools. They survive a reload, and can be stored as
// presets.

import { agrees, byId } from "../dom.js";
import { t } from "../i18n.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
  "repetition_penalty"];
const MODELS = ["model", "other"];
const CURRENT = "quire-options", PRESETS = "quire-presets";
const SHOWN = 5; // alternatives of a token
const GIVEN = { Precise: { temperature: "0" }, Balanced: { temperature: "0.7", top_p: "0.95" }, Creative: { temperature: "1.1", min_p: "0.05" } };
const form = byId("options");
let isStarted = false;

export function start(about) {
  listModels(about.models);
  if (isStarted) return;
  isStarted = true;
  for (const [name, value] of Object.entries(stored(CURRENT, {}))) if (!MODELS.includes(name)) write(name, value);
}

/** Shows the models to choose from. The chosen ones stay, if they are among them. */
export function listModels(names) {
  const { model, other } = form.elements, before = stored(CURRENT, {});
  model.replaceChildren(...names.map((name) => new Option(name, name)));
  other.replaceChildren(new Option(t("nothing"), ""), ...names.map((name) => new Option(name, name)));
  other.closest("label").hidden = names.length < 2;
  for (const name of MODELS) {
    form.elements[name].value = before[name] ?? "";
    if (form.elements[name].selectedIndex < 0) form.elements[name].selectedIndex = 0;
  }
}

/** Begins to store the options, and to react to the presets' buttons. */
export function listen() {
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", keep);
  byId("preset").addEventListener("change", () => apply(byId("preset").value));
  byId("save-preset").addEventListener("click", save);
  byId("remove-preset").addEventListener("click", removePreset);
  showPresets("");
}

/** The model that was used last, if it is one of the names, and the first one otherwise. */
export function modelName(names) {
  const { model } = stored(CURRENT, {});
  return names.includes(model) ? model : names[0];
}

/** The model that answers beside the chosen one, or "". */
export function otherModel() { return form.elements.other.value; }

/**
 * The fields of a request. Throws an error that names a field that cannot be read.
 * @returns {{ system: string, body: object, more: object }} more: further fields, which replace others
 */
export function read(about) {
  const fields = form.elements, body = { model: fields.model.value };
  for (const name of NUMBERS) if (fields[name].value !== "") body[name] = Number(fields[name].value);
  if (fields.stop.value) body.stop = [fields.stop.value];
  const schema = json(fields.schema.value, t("The JSON schema"));
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json(fields.tools.value, t("The list of tools"));
  if (tools && about.has_chat_template) {
    body.tools = tools;
    if (fields.tool_choice.value) body.tool_choice = fields.tool_choice.value;
  }
  if (fields.logprobs.checked) Object.assign(body, about.has_chat_template ? { logprobs: true, top_logprobs: SHOWN } : { logprobs: SHOWN });
  return { system: fields.system.value.trim(), body, more: json(fields.more.value, t("The object of further fields")) ?? {} };
}

function json(text, what) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(t("{what} is not valid JSON: {error}", { what, error: error.message }));
  }
}

// ---- what is stored

function stored(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function fieldsOf() { return [...form.elements].filter(({ name }) => name); }

function values() {
  return Object.fromEntries(fieldsOf().map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]));
}

function write(name, value) {
  const field = form.elements[name];
  if (!field) return;
  if (field.type === "checkbox") field.checked = value;
  else field.value = value;
  const details = field.closest("details");
  if (details && value && field.tagName === "TEXTAREA") details.open = true;
}

function keep() { localStorage.setItem(CURRENT, JSON.stringify(values())); }

// ---- presets: all options but the models

function presets() { return { ...GIVEN, ...stored(PRESETS, {}) }; }

function showPresets(chosen) {
  const names = Object.keys(presets());
  byId("preset").replaceChildren(new Option(t("none"), ""), ...names.map((name) => new Option(name in GIVEN ? t(name) : name, name)));
  byId("preset").value = chosen;
  byId("remove-preset").disabled = !chosen || chosen in GIVEN;
}

function apply(name) {
  for (const field of fieldsOf()) {
    if (MODELS.includes(field.name)) continue;
    write(field.name, presets()[name]?.[field.name] ?? (field.type === "checkbox" ? field.defaultChecked : ""));
  }
  showPresets(name);
  keep();
}

function save() {
  const name = byId("preset-name").value.trim();
  if (!name || name in GIVEN) { byId("preset-name").focus(); return; }
  const { model: _model, other: _other, ...rest } = values();
  localStorage.setItem(PRESETS, JSON.stringify({ ...stored(PRESETS, {}), [name]: rest }));
  byId("preset-name").value = "";
  showPresets(name);
}

async function removePreset() {
  const name = byId("preset").value;
  if (!await agrees(t("Delete the preset “{name}”?", { name }), t("Delete"), t("Cancel"))) return;
  const { [name]: _removed, ...rest } = stored(PRESETS, {});
  localStorage.setItem(PRESETS, JSON.stringify(rest));
  showPresets("");
}

// Words and numbers of the step-through.

/** A probability; null where the recording does not tell it. */
export const share = (value) => (value === null ? "unknown" : value === 0 || value === 1 ? String(value) : value < 0.0005 ? "<0.001" : value.toFixed(3));
export const said = (text) => JSON.stringify(text);
export const line = (text) => text.replaceAll("\n", "↵"); // what breaks no line here
export const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;
export const millis = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;

// Texts packed by gzip and written in base64, of which both alphabets are read.

/** The text of a stream of bytes, as far as it is no longer than the limit: a small file may unpack to gigabytes. */
export const textOf = async (stream, limit = Infinity) => {
  const reader = stream.getReader();
  const parts = [];
  for (let size = 0; size <= limit; ) {
    const { done, value } = await reader.read();
    if (done) return new Blob(parts).text();
    parts.push(value);
    size += value.length;
  }
  reader.cancel();
  throw new RangeError("The text is too long.");
};

export const gunzip = (stream) => stream.pipeThrough(new DecompressionStream("gzip"));

/** Base64 that can stand in an address. */
export const packed = async (text) => {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
};

export const unpacked = (text, limit) => {
  const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return textOf(gunzip(new Blob([Uint8Array.from(binary, (byte) => byte.charCodeAt(0))]).stream()), limit);
};

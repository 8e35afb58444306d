// What the pages share that are one file: dark or light, and the texts that stand in the file.
import { isDark, toggleDark } from "../assets/top.js";
import { unpacked } from "./packing.js";

document.body.classList.toggle("dark", isDark());
document.querySelector(".sd-dark").addEventListener("click", toggleDark);

export const inFile = (id) => unpacked(document.getElementById(id).textContent);

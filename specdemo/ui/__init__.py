"""The web page. Nothing outside this package imports it, and the rest of specdemo runs without gradio."""

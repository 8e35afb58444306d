"""What the server does beside Gradio: streams of a run and of the status, our script and style sheet."""

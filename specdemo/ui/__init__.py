"""The web page. Only `app.py` and the command `serve` import it; the rest of specdemo runs without gradio.

serve           builds the page and launches it
page, look      put the tabs together; theme, styles, scripts and what `launch` needs
race/           the form, a race from the request to its trace, the arena
lab/            the views of the Lab: forms, runs, and the pictures of the studies
replay/         recordings, files of visitors, what the script plays
api, mcp        the named endpoints; the tools for language models
engine          the one model of the process, the thread that runs it, and how long its work takes
jobs, runs      a race or a measurement from the request to its end, and those of the last minutes
run_and_stop    what the buttons Run and Stop do
zero            the same where a GPU is lent for each race
hub_login       whose token the hub is asked with
health          what the operator may know: /health, a line for each race, counters
line            who may wait for the model, and in which place
serving/        streams, scripts and checks of requests, beside Gradio
budgets, values limits for one request; checks of values and JSON
assets/         what is of the whole page: its styles, shared scripts, the line at the top
"""

"""The command line: reads options, calls the stages' pipeline or one command, prints, and gives the exit code.

It refuses options that contradict each other, and is the only place that catches errors and prints them. `app` has
the commands; `console` has what a person sees; each other module is the work of one command.
"""

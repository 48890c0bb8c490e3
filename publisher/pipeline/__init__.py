"""The run: the stages as one table, the loop that works through them, what of earlier work still holds, and the lock.

It refuses a second run on the same output, results of other inputs or other code, and publishing what did not pass.
Begin with `table`, then `run`. `options` has what a run is asked to do, `sites` what a stage works on, `keys` what each
result rests on, `markers` whether it still holds, `calls` how each stage is called, `publishable` what publishing asks
for, `merge` is the command of that name; `stages/` has one module for each stage.
"""

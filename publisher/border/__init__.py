"""The border: the only place where foreign text, files and numbers become values that the rest of the tool may use.

Foreign is whatever this project did not write itself in this run: checkpoints, repositories, manifests of others,
answers of a server. What goes in is bounded and checked here (`limits` is the one table of bounds); what goes out to a
terminal, to Markdown or to HTML is escaped here (`escape`). Nothing behind the border sees the raw form.
Begin reading with `limits`.
"""

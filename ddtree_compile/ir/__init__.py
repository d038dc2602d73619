"""The intermediate representation: graphs, their text, their legality, the op table and the interpreter."""

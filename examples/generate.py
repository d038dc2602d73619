"""Text in, text out, and what speculation was worth, with the model that comes with the package.

python examples/generate.py "def fibonacci(n):" 60
"""

import sys

from ddtree_compile import Engine, SamplingParams, embedded_spec, load_tokenizer, read_spec


def main(prompt: str, max_new_tokens: int) -> None:
    """Continue `prompt`, once greedily and once sampled."""
    spec = read_spec(embedded_spec())
    tokenizer = load_tokenizer(spec.target_dir)
    assert tokenizer is not None  # a checkpoint may lack one; this one has it
    prompts = [tokenizer.encode_prompt(prompt)] * 2
    params = [
        SamplingParams(max_new_tokens=max_new_tokens),
        SamplingParams(max_new_tokens=max_new_tokens, temperature=0.7, top_p=0.9, seed=1),
    ]
    with Engine.from_spec(spec) as engine:
        for generation in engine.generate(prompts, params):
            print(prompt + tokenizer.decode(generation.token_ids))
            accepted = sum(generation.accept_lengths) / max(generation.rounds, 1)
            print(f"-- {generation.finish_reason}: {generation.rounds} rounds, {accepted:.2f} tokens a round\n")


if __name__ == "__main__":
    main(*(sys.argv[1:2] or ["def read_lines(path):"]), int((sys.argv[2:3] or ["80"])[0]))

"""config.json files that ask for what we lack, contradict each other, or are broken."""

from case import DROP, Case, Change, config, remove, write

QWEN, KIMI = "plan {root}/spec.toml -o {root}/new.json", "plan {root}/kimi.toml -o {root}/new.json"
LACK = "is not supported"


def target(**changes: object) -> Change:
    return config("target/config.json", **changes)


def kimi(**changes: object) -> Change:
    return config("kimi-target/config.json", **changes)


def drafter(**changes: object) -> Change:
    return config("drafter/config.json", **changes)


def _copy(of: str, to: str) -> Change:
    return lambda root: (root / to).write_bytes((root / of).read_bytes())


CONFIGS = [
    # The file
    Case("no config", QWEN, 2, "target/config.json: no such file; a model directory needs",
         remove("target/config.json")),
    Case("no drafter config", QWEN, 2, "drafter/config.json: no such file", remove("drafter/config.json")),
    Case("broken JSON", QWEN, 2, "target/config.json: is not JSON", write("target/config.json", '{"model_type": ')),
    Case("nested without end", QWEN, 2, "target/config.json: is not JSON", write("target/config.json", "[" * 100_000)),
    Case("a list", QWEN, 2, "holds a list, not a JSON object", write("target/config.json", "[]")),
    Case("binary", QWEN, 2, "target/config.json: is not JSON", write("target/config.json", b"\x80\x02\xff")),
    Case("a page of HTML", QWEN, 2, "drafter/config.json: is not JSON", write("drafter/config.json", "<html>")),
    # The target
    Case("another model", QWEN, 2, "model_type = 'llama' is not supported .*qwen3", target(model_type="llama")),
    Case("no model_type", QWEN, 2, f"model_type = None {LACK}", target(model_type=DROP)),
    Case("a list as model_type", QWEN, 2, LACK, target(model_type=["qwen3"])),
    Case("another class", QWEN, 2, f"architectures = .* {LACK}", target(architectures=["Qwen3Classifier"])),
    Case("biases", QWEN, 2, f"attention_bias = True {LACK}", target(attention_bias=True)),
    Case("another activation", QWEN, 2, f"hidden_act = 'gelu' {LACK}", target(hidden_act="gelu")),
    Case("a target of windows", QWEN, 2, f"layer_types = .* {LACK} in a target",
         target(layer_types=["sliding_attention"] * 2)),
    Case("kinds of too few layers", QWEN, 2, "layer_types = .*has 1 entries for",
         target(layer_types=["full_attention"])),
    Case("odd heads", QWEN, 2, "is not a multiple of num_key_value_heads = 3", target(num_key_value_heads=3)),
    Case("an odd rotary dimension", QWEN, 2, "the rotary dimension 15 is odd", target(head_dim=15)),
    Case("fp16", QWEN, 2, f"dtype = 'float16' {LACK}", target(dtype="float16")),
    Case("an unknown key", QWEN, 2, "logit_scale = 2.0 is a key this version does not know", target(logit_scale=2.0)),
    Case("text for a number", QWEN, 2, "hidden_size = '64' is not a whole number", target(hidden_size="64")),
    Case("no layers", QWEN, 2, "num_hidden_layers = 0 is out of range", target(num_hidden_layers=0)),
    Case("no size", QWEN, 2, "intermediate_size is missing; it is required", target(intermediate_size=DROP)),
    Case("an infinite size", QWEN, 2, "intermediate_size = inf is not a whole number",
         target(intermediate_size=float("inf"))),
    Case("a size beyond memory", QWEN, 2, "intermediate_size = 1000+ is out of range",
         target(intermediate_size=10**18)),
    Case("layers beyond counting", QWEN, 2, "num_hidden_layers = 1000+ is out of range .*to 1000",
         target(num_hidden_layers=10**9, layer_types=DROP)),
    Case("other rope", QWEN, 2, f"'linear' {LACK}", target(rope_parameters={"rope_type": "linear", "rope_theta": 1e4,
         "factor": 2.0})),
    Case("GPTQ", QWEN, 2, f"quant_method = 'gptq' {LACK}", target(quantization_config={"quant_method": "gptq"})),
    Case("expert groups", KIMI, 2, f"n_group = 2 {LACK}", kimi(n_group=2)),
    Case("groups to choose", KIMI, 2, f"topk_group = 2 {LACK}", kimi(topk_group=2)),
    Case("a softmax router", KIMI, 2, f"scoring_func = 'softmax' {LACK}", kimi(scoring_func="softmax")),
    Case("a greedy router", KIMI, 2, f"topk_method = 'greedy' {LACK}", kimi(topk_method="greedy")),
    Case("multi-token prediction", KIMI, 2, "num_nextn_predict_layers = 1 .*DFlash drafts instead",
         kimi(num_nextn_predict_layers=1)),
    Case("more experts than there are", KIMI, 2, "num_experts_per_tok = 5 is out of range",
         kimi(num_experts_per_tok=5)),
    Case("8-bit experts", KIMI, 2, f"num_bits = 8 {LACK}",
         kimi(quantization_config__config_groups__group_0__weights__num_bits=8)),
    Case("asymmetric experts", KIMI, 2, f"symmetric = False {LACK}",
         kimi(quantization_config__config_groups__group_0__weights__symmetric=False)),
    Case("groups that do not divide", KIMI, 2, "group_size = 48 .*does not divide the 64 inputs of .*correct it",
         kimi(quantization_config__config_groups__group_0__weights__group_size=48)),
    Case("a broken pattern", KIMI, 2, "holds a pattern that is none: 're:\\('",
         kimi(quantization_config__ignore=["re:("])),
    # The drafter
    Case("a drafter as target", QWEN, 2, "target/config.json: architectures = \\['DFlashDraftModel'\\]",
         _copy("drafter/config.json", "target/config.json")),
    Case("a target as drafter", QWEN, 2, "drafter/config.json: architectures = .*supported: DFlashDraftModel",
         _copy("target/config.json", "drafter/config.json")),
    Case("a Kimi as drafter", KIMI, 2, "kimi-drafter/config.json: architectures", _copy("kimi-target/config.json",
         "kimi-drafter/config.json")),
    Case("a drafter of other layers", KIMI, 2, "num_target_layers = 3 differs from the target's layers, 2",
         config("kimi-drafter/config.json", num_target_layers=3)),
    Case("a drafter of another vocabulary", QWEN, 2, "vocab_size = 98 differs from the target's vocabulary, 97",
         drafter(vocab_size=98)),
    Case("a drafter of another width", QWEN, 2, "hidden_size = 32 differs from the target's, 64",
         drafter(hidden_size=32)),
    Case("DSpark", QWEN, 2, "markov_rank = 8 .*a DSpark drafter", drafter(dflash_config__markov_rank=8)),
    Case("Domino", QWEN, 2, "projector_type = 'domino' .*a Domino", drafter(dflash_config__projector_type="domino")),
    Case("DFlash2", QWEN, 2, "conv_kernel_size = 2 .*a DFlash2 drafter", drafter(dflash_config__conv_kernel_size=2)),
    Case("a causal head", QWEN, 2, f"causal_head = True {LACK}", drafter(causal_head=True)),
    Case("the speculators format", QWEN, 2, "convert it to a DFlash checkpoint",
         drafter(speculators_model_type="dflash")),
    Case("a mask of its own", QWEN, 2, "mask_embedding.pt: a drafter with its own mask",
         write("drafter/mask_embedding.pt", b"")),
    Case("no taps", QWEN, 2, "target_layer_ids is missing; it is required",
         drafter(dflash_config__target_layer_ids=DROP)),
    Case("taps of layers that are not there", QWEN, 2, r"\[0, 2\] is out of range \(target layers 0 to 1\)",
         drafter(dflash_config__target_layer_ids=[0, 2])),
    Case("a tap twice", QWEN, 2, "names a layer twice", drafter(dflash_config__target_layer_ids=[1, 1])),
    Case("no mask token", QWEN, 2, "mask_token_id is missing", drafter(dflash_config__mask_token_id=DROP)),
    Case("a mask token outside", QWEN, 2, "mask_token_id = 97 is out of range",
         drafter(dflash_config__mask_token_id=97)),
    Case("no block", QWEN, 2, "block_size is missing", drafter(block_size=DROP)),
    Case("a block of one", QWEN, 2, "block_size = 1 is out of range", drafter(block_size=1)),
    Case("two blocks", QWEN, 2, "block_size = 8 contradicts the top level's 4", drafter(dflash_config__block_size=8)),
    Case("a quantised drafter", QWEN, 2, "a quantised drafter", drafter(quantization_config={"quant_method": "fp8"})),
    Case("no nested table", QWEN, 2, "dflash_config = 3 is not an object", drafter(dflash_config=3)),
    Case("windows without a size", QWEN, 2, "sliding_window is missing", drafter(layer_types=["sliding_attention"])),
]  # fmt: skip

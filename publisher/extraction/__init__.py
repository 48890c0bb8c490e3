"""From two checkpoints to the factors of each module: comparing them, one module's work, and the summary.

It refuses a difference that no adapter can hold, and a base that the fine-tune was not trained from; each refusal names
all tensors concerned. Begin with `comparison`, which says what differs, then `module`, which takes the factors out of
one weight.

    preflight          names, shapes and dtypes by the headers      tensor_bytes     which tensors differ
    modules_to_save    modules that are stored whole                model_structure  what the model class knows
    adaptable          what a LoRA of PEFT can hold                 delta_norms      how much each tensor differs
    comparison         all of these, in this order                  base_check       whether it is the right base
    module             one weight becomes factors and figures       module_cache     finished modules on disk
    summary            an extraction in a few figures
"""

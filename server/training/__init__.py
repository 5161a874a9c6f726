"""Fine-tuning for a task: LoRA, and rows for the tokens of an enrichment (TASC-ft). Needs torch.

examples   prompts and outputs as ids, in batches of alike lengths
stored     frozen matrices in the form that they are stored in
lora       the model with its adapter, and the adapter's folder
loop       the steps: schedule, validation, checkpoints, time limit
"""

"""Run the guess_number recipe of tinker-cookbook with a loss and a checkpoint, which its command line does not offer.

python guess_number.py LOSS CHECKPOINT NAME=VALUE ...    (arguments of the recipe)
"""

import asyncio
import sys

import chz
from tinker_cookbook.recipes.multiplayer_rl.guess_number.train import CLIConfig, build_config
from tinker_cookbook.rl.train import main

loss, checkpoint, *words = sys.argv[1:]
config = build_config(chz.Blueprint(CLIConfig).make_from_argv(words))
asyncio.run(main(chz.replace(config, loss_fn=loss, load_checkpoint_path=checkpoint)))

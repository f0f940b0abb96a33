"""Train on a file of conversations with the supervised recipe of tinker-cookbook, which has no command line for it.

python supervised.py FILE BATCH_SIZE NAME=VALUE ...    (fields of tinker_cookbook.supervised.train.Config)
"""

import asyncio
import sys

import chz
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.train import Config, main
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

file, batch_size, *words = sys.argv[1:]
settings = dict(word.split("=", 1) for word in words)
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=settings["model_name"],
    renderer_name=settings["renderer_name"],
    max_length=None,
    batch_size=int(batch_size),
    train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
)
data = FromConversationFileBuilder(common_config=common, file_path=file)
asyncio.run(main(chz.Blueprint(Config).apply({"dataset_builder": data}).make_from_argv(words)))

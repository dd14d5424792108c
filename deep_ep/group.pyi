from deep_ep.base.group import Board as Board
from deep_ep.base.group import Group as Group
from deep_ep.base.group import MpiGroup as MpiGroup
from deep_ep.base.group import ThreadGroup as ThreadGroup
from deep_ep.base.group import TorchGroup as TorchGroup
from deep_ep.base.group import as_group as as_group
from deep_ep.base.group import board_of as board_of
from deep_ep.base.group import thread_groups as thread_groups

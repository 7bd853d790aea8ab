"""Eight questions of very different lengths."""

PROMPTS = (
    "Here is a short story. A fox saw grapes on a high vine. She jumped once, she jumped "
    "twice, she jumped until the sun went down, and she could not reach them. As she walked "
    "away she said that they were surely sour, and that she had never wanted them. What does "
    "the story teach?",
    "What is gravity?",
    "Summarise this letter in one sentence. Dear neighbour, I write to you because of the "
    "tree at the end of the garden. It has stood there since before either of us was born, "
    "and I am fond of it, as I know you are. But after the storm last week one of its large "
    "branches is cracked, and it now hangs over the path on which the children walk to "
    "school. I have asked a man from the town to look at it, and he says that the branch must "
    "come down before winter, although the tree itself is healthy and could stand for another "
    "hundred years. He can come on Tuesday or on Thursday, he needs to put his ladder into "
    "your flower bed, and he promises to be careful. Would you allow it, and would you tell "
    "me which of the two days suits you better? I would pay for the work, and I would of "
    "course share the firewood with you. With kind regards, Anna",
    "Name three primary colours.",
    "I keep a notebook in which every page holds sixteen lines. When a page is full I take "
    "the next empty one, wherever it happens to be in the book, and write its number into a "
    "table at the front. Because of the table I can always read my notes in the right order, "
    "although their pages are scattered. When a note is no longer needed, I tear its number "
    "out of the table and its pages are free for the next note. Nothing is ever moved, and no "
    "page stays empty for long. Give this method a name, and say where a computer could use "
    "it.",
    "Write one sentence about the sea.",
    "The list is: apples, bread, milk, eggs, coffee, rice, onions, soap. Which of these could "
    "I not eat, and which would I drink?",
    "Explain to a child of eight why the sky is blue by day, red in the evening and black at night.",
)

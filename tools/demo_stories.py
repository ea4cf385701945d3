# ruff: noqa: E501 - a beat is a line
"""Children's stories written from plots: the plain-text half of the demo model's corpus.

A story is an opening that introduces the hero, the hero's character, a plot of some beats, and an ending. Every beat
has several wordings and no two beats share a sentence, so that a story never repeats itself. Only the hero has a name,
so that a model trained on these stories learns to remember it.
"""

import random
import re
import zlib
from dataclasses import dataclass

from demo_questions import BOYS, GIRLS, expand, lines_of

ANIMALS = (
    "rabbit fox bear mouse cat dog bird frog duck squirrel hedgehog turtle owl pig lamb deer badger mole otter "
    "beaver pony goat hen bee "
    "penguin elephant lion monkey panda kitten puppy snail dragon crow swan donkey"
).split()
CHILDREN = {"boy": BOYS, "girl": GIRLS, "prince": BOYS, "princess": GIRLS}
ADJECTIVES = "little small young tiny brave clever kind shy curious funny happy lazy quiet cheerful gentle hungry lonely proud".split()
HELPER_ADJECTIVES = "old wise kind big friendly gentle clever tall".split()
PLACES = (
    "the forest|the meadow|the village|the river|the mountains|the garden|the lake|the hills|the farm|the sea|"
    "the valley|the old mill|"
    "the town|the pond|the woods|the castle|the beach"
).split("|")
FOODS = (
    "a cake|berry pie|warm soup|fresh bread|sweet apples|pancakes|honey cakes|nut cookies|carrot soup|strawberry "
    "jam|hot cocoa|cheese and bread"
).split("|")
WEATHERS = "sunny|windy|warm|cold|bright|quiet|cloudy|fine|misty|golden".split("|")

OPENINGS = """
    Once upon a time there was {a} named {n}.
    Once upon a time, there was {a} named {n}.
    Once upon a time there was {a} called {n}.
    Once upon a time there lived {a} named {n}.
    Once upon a time, {a} named {n} lived near {p}.
    There once was {a} named {n}.
    Long ago, near {p}, there lived {a} called {n}.
    A long time ago, there was {a} named {n}.
    In {p} there lived {a} named {n}.
    {n} was {a} who lived near {p}.
    This is the story of {n}, {a}.
    One day, {a} named {n} woke up very early.
    Once there was {a} whose name was {n}.
    Far away, behind {p}, lived {a} named {n}.
    On a {w} morning, {a} named {n} looked out of the window.
    One {w} day, {a} called {n} went for a walk.
    Not far from {p} lived {a} called {n}."""
HELD_OPENINGS = """
    Many years ago, there was {a} named {n}.
    Once upon a time, near {p}, there lived {a} called {n}.
    There was once {a} called {n}.
    One {w} morning, {a} named {n} woke up.
    This is a story about {a} named {n}.
    Long, long ago there lived {a} named {n}.
    Once there lived {a} called {n}."""

TRAITS = """
    {n} (loved|liked) to (sing|dance|run|draw|read|climb|play|swim) (all day long|in the sun|every morning|more than anything).
    Everyone (in the village|near {p}|nearby) liked {n}, because {he} was always (kind|polite|friendly|ready to help).
    {He} had (soft brown ears|bright eyes|a big smile|a warm red scarf|a small blue hat|two muddy feet) and a very good heart.
    {n} lived in a (small|cosy|tidy|round) house with a (green|red|blue|yellow) door.
    Every morning, {n} (ate|had) {f} for breakfast.
    {He} lived with {his} (mother|father|grandmother|three brothers|two sisters) in a (cosy|small|warm) home under (a tree|a hill|the roof).
    {n} was (small|young), but {he} had very big (dreams|ideas|plans).
    {He} was (curious|brave|careful|patient) and always asked (many|a hundred|good) questions.
    Of all the things in the world, {n} liked {f} best.
    {His} house stood (beside|close to|not far from) {p}, where the (wind|birds) sang all day."""
TRANSITIONS = """
    One {w} (morning|day|afternoon), something (happened|changed|strange happened).
    Then came a {w} day that {n} would never forget.
    It was a {w} (morning|day) (in spring|in summer|in autumn|in winter).
    But one (day|morning|evening) everything was different.
    Our story begins on a {w} (day|morning|evening)."""
JOYS = """
    {n} (jumped|danced|laughed) (for|with) joy.
    {n} felt (warm|happy|light|proud) inside.
    "(Hooray|Hurrah|Wonderful)!" (cried|shouted|called) {n}.
    A big smile came over {n}'s face.
    {n}'s heart was (full of joy|beating fast with joy|as light as a feather)."""
PARTIES = """
    That evening, they all sat together and ate {f}.
    To celebrate, {n} made {f} for everyone.
    Soon all the (neighbours|animals|friends) came and brought {f}.
    Afterwards there was (music|singing|dancing) and plenty of {f}.
    Together they shared {f} under the (stars|old tree|moon)."""
MORALS = """
    {n} had learned that (a good friend is worth more than gold|helping others makes you happy|it is good to ask for help).
    From then on, {n} knew that (being kind is never wrong|small steps can lead far|nobody is too small to help).
    After that, {n} always remembered to (be patient|say thank you|share with others|listen first|tell the truth).
    And {n} was never (afraid|lonely|sad|bored) again.
    It was the best day that {n} had ever had."""
ENDINGS = """
    And they all lived happily ever after.
    Then {n} went to bed and (slept well|had sweet dreams|dreamed of new adventures).
    That night, {n} fell asleep with a smile. The end.
    And if you go to {p}, you may still meet {n} there today.
    {He} closed {his} eyes, and the moon looked down on {p}. The end.
    And so the story of {n} ends. The end.
    And they stayed friends for the rest of their lives.
    And that is how {n} became the (happiest|proudest|kindest) (one|of all) near {p}."""

PLOTS = """
o=red ball|blue kite|silver bell|warm hat|wooden boat|little drum|golden key|green scarf
{n} could not find {his} {o}. / {His} {o} was gone, and {n} did not know where it was. / When {n} looked in the box, the {o} was missing.
{He} looked under the bed, behind the door and even in the cooking pot. / First {he} searched the whole house from top to bottom.
"Where can it be?" {n} asked (sadly|quietly|with tears in {his} eyes). / {n} sat down on the steps and began to cry.
{Ah} came along and asked what was wrong. / Just then {ah} walked by and saw the tears.
"Think back. Where did you last play with it?" said {th}. / "Let us look for it together," said {th}.
Step by step they followed the path back to {p}. / They walked all the way to {p} and looked behind every stone.
There, between two (roots|stones|flowers), lay the {o}! / Something shone in the grass, and it was the {o}!
---
o=cake|pie|pudding|soup
{n} wanted to bake {ao} for {his} mother's birthday. / It was grandmother's birthday, and {n} wanted to make her {ao}.
{He} took out the (flour|big bowl) and put on an apron. / So {he} read the recipe three times and rolled up {his} sleeves.
But the (sugar|butter|milk) jar was empty! / But there was not a single egg in the house.
{n} knocked at the door of {ah} who lived next door. / "I will ask the neighbours," said {n}, and {he} ran to {ah}.
"Of course you can have some of mine," said {th}. / "Take what you need, but let me help you stir," said {th}.
They mixed, stirred and laughed until their noses were white. / Together they worked for an hour, and the kitchen smelled sweet.
When the {o} was ready, it was a little (crooked|burnt|flat), but it tasted wonderful. / At last the {o} stood on the table, and everybody wanted a piece.
---
{n} was afraid of the dark. / When night came, {n} always hid under the blanket.
Every shadow looked like a (monster|giant|wolf) to {him}. / The wind in the chimney sounded like a voice to {him}.
One night there was a knock at the window. / That evening the lamp went out, and everything was black.
"Who is there?" whispered {n}. / {n} held {his} breath and counted to ten.
It was only {ah} with a small lantern. / Outside stood {ah} who had lost the way home.
"Come with me, I will show you how beautiful the night is," said {th}. / "Do not be afraid, the night is full of lights," said {th}.
They went out and saw a thousand stars above {p}. / Over {p} the fireflies were dancing like tiny lamps.
"The dark is not so bad after all," said {n}. / Now {n} saw that the shadows were only trees.
---
o=boat|raft|cart|kite|treehouse|sledge
{n} wanted to build {ao}. / {n} had a plan: {he} would build a real {o}.
{He} collected (wood|sticks|boards), rope and some old nails. / All morning {he} carried sticks and planks out of the shed.
But the first {o} fell apart at once. / {n} hammered and tied, but the {o} broke in two.
"I will never manage it," {n} said with a sigh. / {n} wanted to give up and threw the hammer into the grass.
{Ah} had watched {him} from a branch. / At that moment {ah} looked over the fence.
"You need stronger knots. Let me show you," said {th}. / "Good things take time. Try it once more," said {th}.
They worked side by side until the sun went down. / This time {n} measured twice and cut only once.
The new {o} was (strong|light|splendid) and did not break. / In the evening the {o} stood finished in front of {p}.
---
It had not rained for many weeks, and the flowers near {p} hung their heads. / The summer was so hot that the well near {p} ran dry.
"We must find water," said {n}. / {n} saw how thirsty everyone was and wanted to help.
{He} took a bucket and walked up the steep hill. / With an empty jug on {his} back, {he} set off alone.
On the way {he} met {ah} who was too weak to walk. / Under a bush lay {ah} with a dry throat.
{n} gave away {his} last drop of water. / Without a thought, {n} shared {his} own small bottle.
"Because you are kind, I will tell you a secret," said {th}. / "There is a spring behind the great rock," whispered {th}.
Behind the rock {n} found clear cold water. / And truly, there the water jumped out of the stone.
Soon everyone could drink again. / By evening all the buckets were full.
---
o=honey|cookies|cherries|nuts|apples
{n} had a big basket full of {o}. / In {his} cupboard {n} kept a whole sack of {o}.
"These are all mine," {he} said and would not share. / {He} hid them well, because {he} did not want to give any away.
{Ah} came and asked for just one. / Soon {ah} knocked and said, "I am so hungry."
"No, go away!" said {n}. / But {n} shut the door in a hurry.
That night {n} ate and ate until {his} belly hurt. / The next day {n} sat alone with the {o} and felt terribly lonely.
"What good are {o} if nobody eats them with me?" {he} thought. / {He} thought about the sad eyes of {th}.
So {n} took the basket and went to find {th}. / Quickly {n} ran after {th} and said sorry.
They shared the {o} fairly, one for you and one for me. / "Now they taste twice as good," said {th}.
---
There was going to be a great race around {p}. / A sign said that the big race would start at {p} on Sunday.
{n} had the shortest legs of all, but {he} wanted to take part. / "I will run too," said {n}, and some of the others laughed.
Every day {he} trained (before breakfast|after school|in the rain). / For a week {he} ran up and down the hill until {he} was out of breath.
When the race began, {n} was soon the last. / The others ran off like the wind, and {n} could only see their dust.
Then {he} saw {ah} lying in a ditch. / Halfway along the road {ah} had fallen and could not get up.
{n} stopped, even though {he} wanted to win. / Without thinking of the prize, {n} turned back.
{He} helped {th} up and they went on together, arm in arm. / "Lean on me," {he} said, and slowly they walked to the finish.
They came in last, but everyone cheered for them. / The judge gave {n} a medal for the kindest runner.
---
o=letter|parcel|postcard|basket
{n} had to carry {ao} to {his} grandmother on the other side of {p}. / "Please take this {o} to your aunt behind {p}," said {his} mother.
{He} put it into {his} bag and walked off, whistling a tune. / So {he} tied {his} shoes and promised to be careful.
But at the crossing there were three roads. / But a thick fog came up and hid the road.
{n} did not know which way to go. / Soon {n} was quite lost and sat down on a stump.
{Ah} came out of a hollow tree. / All at once {he} heard the steps of {ah}.
"Follow the sound of the bells," said {th}. / "I know every path here, just hold on to me," said {th}.
{n} listened well and went on, one step after the other. / They passed a bridge, a mill and a field of poppies.
At last {he} saw the chimney and the open door. / The {o} arrived safely, and there were hugs and kisses.
---
A loud storm blew over {p} in the night. / In the evening dark clouds came over {p}, and it began to thunder.
{n} heard somebody calling for help. / Through the noise of the rain {n} heard a thin voice.
{He} put on {his} boots and ran outside. / Although {he} was afraid, {he} took the lamp and went out.
The wind had blown down the house of {ah}. / A tree had fallen on the home of {ah}.
"Come into my house, there is room for two," said {n}. / "Quick, take my hand!" called {n}.
They drank hot tea by the fire while the storm went on. / All night long they told each other stories.
In the morning the sun shone again as if nothing had happened. / When day came, the sky was washed clean and blue.
They fetched wood and built a new house that was stronger than before. / With the help of all the neighbours, a new roof was made.
---
o=flute|violin|drum|trumpet|guitar
{n} wanted to learn to play the {o}. / For {his} birthday {n} got a shiny new {o}.
But when {he} played, it sounded like a creaking door. / The first notes were so bad that the birds flew away.
"Please stop!" called the neighbours. / Somebody shut a window with a bang.
{n} put the {o} into the corner and felt ashamed. / With red ears {n} ran off to {p}, where nobody could hear.
There {ah} was listening. / In the evening {ah} came and sat down next to {him}.
"Play slowly, and play a little every day," said {th}. / "I was worse than you when I began," said {th} with a wink.
So {n} practised one small song again and again. / Week after week the notes became clearer and softer.
At the summer feast {n} played for everyone, and they clapped for a long time. / On the night of the feast, even the neighbours danced to the {o}.
---
{n} found a small egg in the grass near {p}. / Under a bush beside {p} lay a lonely egg with blue spots.
There was no nest and no mother anywhere. / {He} looked up into the trees, but no nest could be seen.
{n} wrapped the egg in {his} scarf and kept it warm. / So {n} carried it home and laid it beside the stove.
For three days {he} did not leave it alone. / Day and night {he} watched over it and hummed a song.
Then there was a crack, and a tiny beak came out. / On the fourth morning the shell broke with a soft sound.
"Peep!" said the chick and looked at {n}. / A wet little bird blinked at {n}.
{Ah} helped {him} to find worms and seeds. / "It needs to learn to fly," said {ah} who lived nearby.
When summer came, the bird could fly high above the roofs. / One day the bird spread its wings, but every spring it came back to visit.
---
o=star|moon|rainbow|cloud
{n} wanted to touch {ao}. / "I want to reach the {o}," said {n} one evening.
{He} climbed the highest tree near {p}, but it was not high enough. / First {he} stood on a chair, then on the roof, but it was still too far.
"You will fall down," warned {ah}. / {Ah} looked up and laughed in a friendly way.
{n} was disappointed and climbed down again. / With a sigh, {n} slid down and sat in the grass.
"Come, I will show you a trick," said {th}. / "There is another way," said {th} after a while.
They walked to a still pool of water. / {Th} filled a bowl with water and put it on the ground.
There, in the water, {n} saw the {o} quite close. / In the bowl shone the {o}, as near as {his} own nose.
{He} touched it gently with one finger, and it danced. / When {n} put a finger in, the light broke into a hundred pieces.
---
{n} did not want to clean {his} room. / {n}'s room was so untidy that nobody could see the floor.
"I will do it tomorrow," {he} said every day. / There were socks on the lamp and crumbs in the bed.
Then {ah} came to visit and could not find a chair. / One day {ah} wanted to play chess with {him}, but the pieces were lost.
{n} searched and searched, but found only old apples. / {n} turned red, because there was no place to sit.
"Let us make a game of it," said {th}. / "Whoever picks up the most things wins," said {th}.
They threw the toys into boxes and swept until the floor shone. / In one hour they sorted all the books and the marbles.
Under the bed {n} even found a coin that {he} had lost long ago. / Behind the cupboard lay {his} best pencil.
"It is easier to play in a tidy room," {n} had to admit. / Now there was room enough to dance.
---
o=silver coin|gold ring|purse full of money|pearl necklace
On the road {n} found {ao}. / Something shiny lay beside the path to {p}: it was {ao}.
"With this I could buy all the sweets in the shop," {he} thought. / {He} put it into {his} pocket and dreamed of new toys.
But then {he} met {ah} who was crying. / A little later {ah} came along and searched the ground.
"I have lost the only thing that my mother left me," said {th}. / "Without it I cannot pay for my house," said {th}.
{n} thought about it for a moment. / It was hard, but {n} knew what was right.
{He} held out {his} hand and gave the {o} back. / "Is this yours?" asked {n} and showed the {o}.
{Th} cried again, but this time for joy. / "How honest you are!" said {th}.
As a thank you, {n} was given a basket of plums. / From that day, they greeted each other like old friends.
---
It was the first snow of the year, and {p} was white. / Snow had fallen all night long on {p}.
{n} had never seen snow before. / {n} ran outside without {his} gloves.
{He} rolled a small ball, and then a bigger one. / {He} caught the flakes with {his} tongue.
Soon a (fat|tall|funny) snowman stood there with a carrot nose. / So {he} built a snowman with two black buttons for eyes.
"He looks cold," said {n} and gave the snowman {his} own scarf. / {n} was sorry that the snowman was all alone.
{Ah} said, "Let us build another one, then he has company." / Then {ah} came by with a sledge and helped.
They built a whole family, from the biggest to the smallest. / Until the evening they made snow mothers and snow children.
When spring came, only the scarf was left, but {n} was not sad. / In March they melted, and where they had stood the first flowers grew.
---
o=seed|acorn|bean|apple pip
{Ah} gave {n} a tiny {o}. / {n} got {ao} from {ah} as a present.
"Plant it and be patient," said {th}. / "Something big sleeps in it," {th} told {him}.
{n} dug a hole beside {p} and watered it every day. / So {n} put it in the earth and sat down to wait.
After a week there was still nothing to see. / Ten days went by, and the ground was as bare as before.
"It does not work!" said {n} and stamped {his} foot. / {n} wanted to dig it up again to look.
"Give it time," laughed {th}. / But {th} held {him} back just in time.
And one morning there was a small green leaf. / Then, after a warm rain, a green tip looked out of the soil.
Many years later it was so tall that {n} could sit in its shade. / It grew and grew, and at last {n} could swing from its branches.
---
{n} had a bad cold and had to stay in bed. / {n} woke up with a hot head and a sore throat.
"No playing today," said the doctor. / "You have to rest for a week," said {his} father.
Through the window {he} heard the others laughing. / {He} looked at the ceiling and felt very sorry for {himself}.
Then something flew in through the window. / Suddenly there was a tap at the glass.
It was a paper plane with a message from {ah}. / There stood {ah} with a big pot of soup.
"We miss you, so we will play here below your window," said {th}. / "Eat this, and I will read to you," said {th}.
{n} laughed so much that {he} forgot {his} sore throat. / After the second bowl, {n} had red cheeks again.
Three days later {he} was well and ran outside. / By the end of the week {he} could jump over the fence again.
---
{n} moved to a new house near {p} and did not know anybody there. / It was {n}'s first day at the new school near {p}.
{He} stood in the corner and looked at {his} feet. / At noon {he} ate {his} bread all alone.
Nobody said a word to {him}. / "Nobody will like me," {he} thought.
Then a ball rolled right up to {his} toes. / After a while somebody sat down next to {him}.
It was {ah} who asked, "Do you want to play?" / There was {ah} with a friendly face who said, "You can sit with us."
{n} nodded shyly and kicked the ball back. / First {n} spoke very softly, then louder and louder.
Soon they were running and shouting together. / It turned out that they both liked frogs and riddles.
On the way home {n} was singing. / "I have a friend now!" {he} told {his} mother.
---
o=treasure map|strange letter|old bottle with a message
In the attic {n} discovered {ao}. / While digging in the garden, {n} hit on {ao}.
It said: go ten steps from the old oak to {p}. / A red cross was drawn right in the middle of {p}.
{He} took a spade and a lamp and asked {ah} to come along. / "That is too much for one," {he} thought and called {ah}.
They crossed a wobbly bridge and crept through a hollow log. / They waded through the brook and climbed over three fences.
At the cross they began to dig. / "Here it must be!" cried {n} and pushed the spade into the ground.
After a long time they heard a hollow sound. / Deep down there was a box with a rusty lock.
But in it there was no gold, only a book with pictures. / Inside lay old photographs and a note.
"The real treasure is an adventure with a friend," {n} read aloud. / It said: whoever finds this has a brave heart and a good friend.
---
A small dragon lived in a cave above {p}, and everyone was afraid of it. / People said that a monster lived behind {p}.
Only {n} wanted to know if it was true. / "Has anybody ever talked to it?" asked {n}.
{He} packed some bread and climbed up the narrow path. / Before sunrise {he} set out with a stick and a sandwich.
From the cave came a terrible howling. / Smoke came out of the hole in the rock.
{n}'s knees trembled, but {he} went in. / "Hello?" called {n} with a shaking voice.
There sat the beast and held its cheek: it had a toothache! / But the monster only wept big tears, because a thorn was in its foot.
Carefully {n} pulled, and it was over. / {n} tied a thread around it, and with one tug it was out.
From then on it lit the fires for the whole village. / Since that day it has carried the children around on its back.
---
o=clock|bell|lamp|wheel
The big {o} near {p} was broken. / One day the old {o} of the village stopped.
Nobody knew how to repair it. / Everyone looked at it and shook their heads.
"May I try?" asked {n}. / {n} was small enough to creep inside.
"You are far too young for that," grumbled {ah}. / At first {ah} did not want to let {him}.
But {n} had already seen what was wrong. / Quietly {n} opened the little door and looked in.
A (nut|leaf|feather|button) was stuck between two parts. / Between the gears a bird had built its nest.
With two fingers {he} took it out, and everything turned again. / {He} moved the nest to a tree and gave the machine a push.
"I was wrong about you," said {th} and shook {his} hand. / All the people clapped, and {th} clapped the loudest.
---
{n} told everyone that {he} could fly. / {n} liked to tell stories that were not quite true.
"I flew over {p} last night," {he} said. / "I have seen a giant at {p}," {he} told everybody.
The others wanted to see it at once. / "Then show us!" said {ah}.
{n} did not know what to do. / {n}'s stomach hurt, because it was a lie.
All night {he} could not sleep. / {He} hid behind the house until it was dark.
In the morning {he} went to {th}. / Finally {he} went to {th} with {his} head down.
"I am sorry, I made it up," said {n}. / It was hard, but {n} told the truth.
"Thank you for telling me. Your real stories are good enough," said {th}. / {Th} was not angry and gave {him} a hug.
---
o=bridge|door|gate
At the {o} to {p} sat {ah} who let nobody pass. / Nobody could get to {p}, for {ah} was guarding the {o}.
"Only those who answer my riddle may go on," said {th}. / "First tell me the answer to my riddle," said {th}.
{n} was not afraid of riddles. / "Ask me," said {n}.
"What has hands but cannot clap?" / "What gets wetter the more it dries?"
{n} thought and thought and scratched {his} head. / For a long time {n} walked up and down.
Then {he} saw something hanging on a house. / Suddenly {he} had an idea.
"It is a clock!" or maybe a towel, {he} gave both answers with a laugh. / {He} whispered the answer, and it was right.
The {o} opened, and {n} could go on. / "Well done," said {th} and stepped aside.
---
The circus had come to {p}. / Colourful wagons stopped in front of {p}, and a circus tent was put up.
But {n} had no money for a ticket. / {n} counted {his} coins, but there were too few.
{He} looked through a hole in the tent. / Outside {he} listened to the music and sighed.
There {ah} in a costume ran up and down in a panic. / Behind the tent {he} met {ah} who looked quite desperate.
"Our clown is ill, and the show starts in five minutes!" said {th}. / "Who will carry the lamps tonight?" asked {th}.
"I can do that," said {n}. / {n} stepped forward bravely.
{He} stumbled, slipped and fell into a bucket, and everybody laughed. / In a much too big hat {he} walked into the ring and bowed.
The audience clapped until their hands were red. / It was the funniest show of the whole year.
---
o=wagon|cart|sack of potatoes|log
{Ah} wanted to pull a heavy {o} up the hill. / In the middle of the road stood {ah} with {ao} that would not move.
It was stuck in the mud. / No matter how hard {th} pulled, nothing moved.
"Wait, I will help you," called {n}. / {n} put down {his} bag and pushed with all {his} strength.
But two were not enough. / The thing moved a little and rolled back again.
{n} had an idea and ran to {p}. / "We need more friends," said {n}.
{He} came back with half of the village. / Soon a long row of helpers stood on the road.
"One, two, three!" shouted {n}, and all pulled together. / With a loud shout they pushed, from the biggest to the smallest.
With a jerk it came free. / And before they knew it, they were at the top.
---
{n} had a strange dream. / One night {n} dreamed of an island behind {p}.
In the dream the trees were made of (sugar|glass|paper). / There the fish could sing, and it rained lemonade.
{Ah} wore a crown and said, "Welcome." / On a throne of shells sat {ah}.
"You may stay here for ever," said {th}. / "Here you never have to go to bed," said {th}.
{n} ate and played and slid down the rainbow. / At first {n} thought that nothing could be better.
But after a while {he} thought of home. / But nobody there knew {his} favourite song.
"Thank you, but my family is waiting," said {n}. / {n} missed {his} own bed and {his} mother's voice.
Then {he} woke up, and it smelled of breakfast. / {He} opened {his} eyes, and the morning sun was shining on {his} pillow.
---
o=fish|butterfly|firefly|ladybird
{n} caught a beautiful {o}. / Down at {p}, {n} found {ao} that shone like gold.
{He} put it into a glass and carried it home. / "Now you belong to me," {he} said and closed the lid.
But the {o} did not move any more. / Hour after hour the {o} became paler.
"Why are you so sad?" asked {n}. / {n} brought sugar and leaves, but nothing helped.
{Ah} looked at the glass and said, "It is homesick." / "Would you like to live in a glass?" asked {ah}.
{n} shook {his} head slowly. / "No," said {n} after a long silence.
At sunset {he} opened the glass outside. / So {he} carried it back and set it free.
It turned three circles around {his} head and was gone. / It shone brighter than ever, as if it wanted to say thank you.
---
o=jam|paint|ink|honey
By accident {n} spilled {o} all over the carpet. / A whole pot of {o} fell from {n}'s hands.
"Oh no!" {he} cried and turned pale. / A huge spot spread across the floor.
{n} pushed a chair over it, so that nobody would see. / Quickly {n} hid the rag and tiptoed away.
But the cat walked through it and left marks everywhere. / But {his} shoes made a trail through the whole house.
{Ah} saw it at once. / In the doorway stood {ah} who followed the trail with a finger.
"Did the chair do that?" asked {th} with a smile. / "Is there something that you want to tell me?" asked {th}.
{n} told everything, and it felt as if a stone fell from {his} heart. / "It was me," said {n} softly.
They fetched hot water and scrubbed until the spot was gone. / With soap and patience the floor was clean again in the end.
---
{n} wanted to see the sea. / {n} had heard that behind {p} there was water as far as you could look.
"It is a long way," said {his} mother, "but you may go with somebody you trust." / So {he} packed a blanket, a rope and seven sandwiches.
{Ah} had a small wagon and took {him} along. / At the edge of the village {he} met {ah} who had the same wish.
They travelled through fields and slept under the open sky. / By day they sang, and at night they counted the stars.
When a wheel broke, {n} made a new one out of a barrel. / Once they lost the road, but {n} asked a flock of geese.
On the fifth day the air smelled of salt. / At last they came over the final hill.
There it was, blue and endless. / The waves rolled onto the sand and tickled their feet.
{n} put a shell into {his} pocket to remember it. / They stayed until the sun sank into the water.
"""


@dataclass(frozen=True)
class Hero:
    """The main character. `adjective`, `kind` and `name` together determine whether a hero may occur in training."""

    adjective: str
    kind: str
    name: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(f"{self.adjective} {self.kind} {self.name}".encode()) % 8 == 0

    @property
    def slots(self) -> dict[str, str]:
        she = self.name in GIRLS
        he, his, him = ("she", "her", "her") if she else ("he", "his", "him")
        return {
            "n": self.name,
            "he": he,
            "his": his,
            "him": him,
            "himself": f"{him}self",
            "He": he.title(),
            "His": his.title(),
        }


@dataclass(frozen=True)
class Plot:
    beats: tuple[tuple[str, ...], ...]
    objects: tuple[str, ...]


def _plots() -> list[Plot]:
    plots = []
    for block in PLOTS.split("---"):
        lines = lines_of(block)
        objects = tuple(lines[0][2:].split("|")) if lines[0].startswith("o=") else ()
        plots.append(Plot(tuple(tuple(line.split(" / ")) for line in lines[bool(objects) :]), objects))
    return plots


ALL_PLOTS = _plots()


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def draw_hero(rng: random.Random, held_out: bool = False) -> Hero:
    while True:
        kind = rng.choice(list(CHILDREN)) if rng.random() < 0.2 else rng.choice(ANIMALS)
        hero = Hero(rng.choice(ADJECTIVES), kind, rng.choice(CHILDREN.get(kind, BOYS + GIRLS)))
        if hero.held_out == held_out:
            return hero


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a story. A quotation and its speaker count as two."""
    return [part for part in re.split(r"[.!?]+[\"\s]*", text) if part.strip()]


def tell(rng: random.Random, hero: Hero | None = None, openings: str = OPENINGS) -> tuple[str, str]:
    """Return a new story without repeated sentences: its opening sentence and the rest. Without `hero`, the hero is one
    that may occur in training.
    """
    while True:
        opening, rest = _tell(rng, hero or draw_hero(rng), openings)
        sentences = sentences_of(f"{opening} {rest}")
        if len(set(sentences)) == len(sentences):
            return opening, rest


def _tell(rng: random.Random, hero: Hero, openings: str) -> tuple[str, str]:
    plot = rng.choice(ALL_PLOTS)
    helper = f"{rng.choice(HELPER_ADJECTIVES)} {rng.choice([animal for animal in ANIMALS if animal != hero.kind])}"
    slots = hero.slots | {
        "a": article(f"{hero.adjective} {hero.kind}"),
        "p": rng.choice(PLACES),
        "o": (thing := rng.choice(plot.objects) if plot.objects else "nothing"),
        "ao": article(thing),
        "ah": article(helper),
        "Ah": article(helper).capitalize(),
        "th": f"the {helper}",
        "Th": f"The {helper}",
    }

    def say(sentence: str) -> str:
        chosen = rng.choice(expand(sentence))
        return chosen.format_map(slots | {"f": rng.choice(FOODS), "w": rng.choice(WEATHERS)})

    def one(lines: str) -> str:
        return say(rng.choice(lines_of(lines)))

    opening = one(openings)
    sentences = [say(line) for line in rng.sample(lines_of(TRAITS), rng.choice([1, 1, 2]))]
    if rng.random() < 0.5:
        sentences.append(one(TRANSITIONS))
    telling = rng.randrange(2) if rng.random() < 0.7 else None  # the first wordings of a plot's beats fit together best
    sentences += [
        say(rng.choice(beat) if telling is None else beat[min(telling, len(beat) - 1)]) for beat in plot.beats
    ]
    sentences += [one(lines) for lines, chance in ((JOYS, 0.7), (PARTIES, 0.7), (MORALS, 0.7)) if rng.random() < chance]
    sentences.append(one(ENDINGS))
    if rng.random() < 0.4:  # two paragraphs
        at = rng.randrange(2, len(sentences) - 3)
        return opening, " ".join(sentences[:at]) + "\n\n" + " ".join(sentences[at:])
    return opening, " ".join(sentences)


def story_prompts(size: int, seed: int = 2025) -> list[dict[str, str]]:
    """Return openings that training cannot contain: the heroes are held out, and so is the wording of every second
    opening."""
    rng = random.Random(seed)
    prompts: dict[str, dict[str, str]] = {}
    while len(prompts) < size:
        hero = draw_hero(rng, held_out=True)
        opening, _ = tell(rng, hero, HELD_OPENINGS if len(prompts) % 2 else OPENINGS)
        prompts[opening] = {"prompt": opening, "name": hero.name}
    return list(prompts.values())
